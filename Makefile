# For a machine with Python 3.11+, make and git: `make run`, `make test`, `make docs`; for developers `make lint`, `make faults`, `make proof`, `make test-extras`, `make mutants`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export DO_NOT_TRACK := true
export MLFLOW_DISABLE_TELEMETRY := true

.PHONY: run test test-extras lint faults proof mutants docs requirements audit

# ThreadRunner: steps that do not need each other, such as the trainings of operator and steady model, run side by side.
run: $(VENV)/installed
	@echo 'Simulates small datasets of 11 PDEs, trains, evaluates and judges: 5 to 16 minutes on two CPU cores,'
	@echo '0.2 GB in data/. Steps that are up to date are skipped; after Ctrl-C the same command goes on.'
	$(BIN)/kedro run --pipeline full --runner ThreadRunner

# Two workers, each with whole files of tests: fixtures with a trained pipeline are made once.
test: $(VENV)/installed
	@echo 'Runs the tests on two CPU cores, among them small runs of the whole pipeline: 6 to 12 minutes,'
	@echo '1 GB below the temporary folder, no network.'
	$(BIN)/python -m pytest -n 2 --dist loadfile

# What needs further packages: Lightning, torchao, S3 simulated by moto, manifests in the schemas of Kubernetes and Kubeflow. The
# packages of requirements.txt keep their versions. A network is needed for the packages alone.
test-extras: $(VENV)/installed
	sed '/--hash/d; s/ \\$$//' requirements.txt > $(VENV)/pins.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/pins.txt --editable '.[lightning,float8,s3-test,manifests-test]'
	$(BIN)/python -m pip check
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/training/test_lightning.py tests/training/test_float8.py tests/data/test_remote.py tests/runs/test_submission.py

# Training under injected faults, and one resumed stage killed again and again: 20 minutes on two cores.
faults: $(VENV)/installed
	UPS_KILLS=3 $(BIN)/python -m pytest -m "faults or slow" tests/training/test_faults.py \
		tests/training/test_faulty_checkpoints.py tests/runs/test_compiler_caches.py \
		"tests/training/test_resume.py::test_a_stage_killed_again_and_again_ends_as_if_undisturbed[1-operator]"

# All of it: faults, bit-exact resume of each stage on 1, 2 and 3 ranks, tuning and benchmark in miniature. Fewer kills per
# resumed job than `pytest -m slow` makes, so that it ends within about an hour on two cores.
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

# The pages in notebooks/, all parameters, the reference and the notebooks; building downloads packages, reading needs no network.
docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/mkdocs build --strict --quiet
	@echo 'Open data/docs/index.html. Only its search needs a server: python3 -m http.server --directory data/docs'

# Versions and hashes of all packages: renew them after a change in pyproject.toml. The CUDA libraries stand by themselves,
# because only a CUDA build of torch needs them. TORCH_CPU: SHA-256 of the CPU build of torch for Python 3.11 on x86_64.
CUDA := nvidia-|cuda-|triton
TORCH_CPU := 6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b
requirements: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[audit]'
	echo 'setuptools>=77' | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --extra dev \
		--no-header --no-annotate --upgrade pyproject.toml - --output-file $(VENV)/all.txt
	awk '/==/ {cuda = /^($(CUDA))/} cuda' $(VENV)/all.txt > requirements-cuda.txt
	awk '/==/ {cuda = /^($(CUDA))/} !cuda {print} /^torch==/ {print "    --hash=sha256:$(TORCH_CPU) \\"}' \
		$(VENV)/all.txt > requirements.txt

# Known vulnerabilities of the pinned packages; needs a network.
audit: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[audit]'
	$(BIN)/pip-audit --strict --require-hashes --disable-pip --requirement requirements.txt

$(VENV)/installed: pyproject.toml requirements.txt
	@echo 'Installs the packages of requirements.txt into $(VENV): some minutes, up to 6 GB on disk.'
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check > $(VENV)/missing.txt \
		|| $(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement requirements-cuda.txt
	$(BIN)/python -m pip check
	touch $@
