# make demo    train a network on 8 virtual cores
# make check   the quick tests
# make test    what a change must pass, and all that .ci/run runs: all tests except the exhaustive ones
# make soak    the exhaustive tests
# make images  the quick tests and more on copies of Kaggle's and Colab's images, and where TorchTPU is installed
# make torchtpu  the last of them alone
# make docs    the site, in build/site
#
# The first of them builds .venv. PYTHON=python3.12 chooses with what, and JOBS=1 runs one test at a time.

PYTHON ?= python3
# One more than processors, for tests that wait.
JOBS ?= $(shell expr $$(nproc) + 1)
BIN := .venv/bin
# A process of tests takes up to 2 GB.
PARALLEL := --numprocesses $(JOBS) --maxprocesses 4
PYTEST := $(BIN)/python -m pytest $(PARALLEL)
RERUN := $(BIN)/python tests/rerun_failed.py $(PARALLEL)
READY := .venv/ready

# Also on a machine that has a TPU: all this is about virtual cores, and the library says how many.
export PJRT_DEVICE := CPU
unexport CPU_NUM_DEVICES
# Some images set it. Then each of the tests' many processes compiles the package and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test soak images torchtpu docs lint

demo: $(READY)
	$(BIN)/python examples/digits.py

check: lint
	$(PYTEST) -m "not slow and not soak"

test: lint
	$(RERUN) --doctest-modules --override-ini testpaths=tpufit
	$(RERUN) -m "not soak"

soak: $(READY)
	$(BIN)/python -m pip install --editable '.[test,examples,preflight,libraries,docs]'
	$(PYTEST) -m soak

images:
	$(PYTHON) tests/images.py --jobs $(JOBS)

torchtpu:
	$(PYTHON) tests/images.py torchtpu --jobs $(JOBS)

docs: $(READY)
	$(BIN)/python -m pip install --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file docs/mkdocs.yml

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --editable '.[test,examples,preflight]'
	touch $@
