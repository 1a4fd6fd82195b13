# For a machine with Python 3.11+, make and git: `make run`, `make test` and, for developers, `make lint`, `make proof`, `make mutants`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export DO_NOT_TRACK := true
export MLFLOW_DISABLE_TELEMETRY := true

.PHONY: run test lint proof mutants

run: $(VENV)/installed
	$(BIN)/kedro run --pipeline full

# Two workers, each with whole files of tests: fixtures with a trained pipeline are made once.
test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Faults, bit-exact resume on 1, 2 and 3 ranks, tuning and benchmark in miniature. Fewer kills per resumed job than
# `pytest -m slow` makes, so that it ends within half an hour on two cores.
proof: $(VENV)/installed
	UPS_KILLS=3 $(BIN)/python -m pytest -m "faults or slow" --durations=20

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

# Small changes of the code (section tool.mutmut of pyproject.toml), each of which a test must notice; survivors stand in
# data/published/mutants/. From the start every time: the tool keeps results although tests change.
mutants: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[mutants]'
	rm -rf mutants
	$(BIN)/mutmut run --max-children 1
	$(BIN)/mutmut export-cicd-stats
	$(BIN)/python tests/survivors.py

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
