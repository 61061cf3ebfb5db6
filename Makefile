# make demo    train a network on 8 virtual cores
# make check   the quick tests
# make test    the gate of every change, which .ci/run runs: all tests except the exhaustive ones
# make soak    the exhaustive tests
# make images  the quick tests and more, in environments like Kaggle's and Colab's images, and with TorchTPU
# make torchtpu  only the tests with TorchTPU
# make docs    the site, in build/site
# make lock    renews tests/constraints.txt, the versions of all packages that the commands above install
# make newest  the tests of `make test`, with the newest packages that setup.cfg allows, in .venv-newest
#
# The first command creates .venv; `make soak` and `make docs` create .venv-soak, which has more packages.
# PYTHON=python3.12 chooses the Python of the environment, and JOBS=1 runs one test at a time.

PYTHON ?= python3
# One process more than there are processors, because some tests wait.
JOBS ?= $(shell expr $$(nproc) + 1)
BIN := .venv/bin
# Each process takes up to 2 GB of memory.
PARALLEL := --numprocesses $(JOBS) --maxprocesses 4
# Expanded at each use (=, not :=), because BIN depends on the target.
PYTEST = $(BIN)/python -m pytest $(PARALLEL)
RERUN = $(BIN)/python tests/rerun_failed.py $(PARALLEL)
READY := .venv/ready
# Before pip 25.3, only the variables, not the option --constraint, also apply to the isolated environment of a build.
CONSTRAINTS := tests/constraints.txt
LOCKED := PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS)

# Even on a machine with a TPU, the tests run on virtual cores; tpufit itself sets their number.
export PJRT_DEVICE := CPU
unexport CPU_NUM_DEVICES
# Some images set this variable, and each of the tests' many processes would compile the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test soak images torchtpu docs lock newest lint

demo: $(READY)
	$(BIN)/python examples/digits.py

check: lint
	$(PYTEST) -m "not slow and not soak"

test: lint
	$(RERUN) --doctest-modules --override-ini testpaths=tpufit
	$(RERUN) -m "not soak"

soak docs: BIN := .venv-soak/bin

soak: .venv-soak/ready
	$(PYTEST) -m soak

images:
	$(PYTHON) tests/images.py --jobs $(JOBS)

torchtpu:
	$(PYTHON) tests/images.py torchtpu --jobs $(JOBS)

docs: .venv-soak/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file docs/mkdocs.yml

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock: $(READY)
	$(BIN)/uv pip compile setup.cfg --output-file $(CONSTRAINTS) --upgrade --universal --python-version 3.10 --no-config \
		--no-annotate --quiet --extra test --extra examples --extra preflight --extra libraries --extra docs

newest: BIN := .venv-newest/bin

newest:
	$(PYTHON) -m venv --clear .venv-newest
	$(BIN)/python -m pip install --editable '.[test,examples,preflight]'
	$(RERUN) --doctest-modules --override-ini testpaths=tpufit
	$(RERUN) -m "not soak"

$(READY): EXTRAS := test,examples,preflight
.venv-soak/ready: EXTRAS := test,examples,preflight,libraries,docs

$(READY) .venv-soak/ready: setup.cfg pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(@D)
	$(LOCKED) $(@D)/bin/python -m pip install --editable '.[$(EXTRAS)]'
	touch $@
