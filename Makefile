# Everything runs in virtual environments of its own: Python >= 3.11 with pip is all a machine needs.
#   make test    lint, types and tests      make demo    K-FAC on real data, with a picture
#   make lint types    style, types         make clean   remove what these make
#   make docs    the documentation site, in site/          make coverage    lines that the tests execute
#   make test-all SEED=1    all tests, on each kernel of OpenBLAS; tutorials; attacks with damaged files
#   make test-minimum    the tests with the lowest versions that pyproject.toml allows
#   make test-gpu    what needs a CUDA device, with its sanitizers where they are installed
#   make measure-gpu    within fifteen minutes: test a device, tune its kernels, measure them
#   make fuzz SECONDS=3600 SEED=1    attacks with damaged files; those that failed are kept in .fuzz
#   make test-web    the package for JavaScript and its page, in Node and Chromium (needs both)
#   make test-exporters    models written by PyTorch, transformers and scikit-learn (installs them)
# Choose the interpreter with `make PYTHON=python3.13 …`.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2
SECONDS ?= 3600
SEED := $(or $(SEED),$(shell date +%s))

# Workers and commands that tests start load compiled modules instead of compiling them again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
DEMO := .venv-demo
DEMO_READY := $(DEMO)/.ready
# The oldest Python, since old versions of packages have no wheels for new ones.
MINIMUM_PYTHON ?= python3.11
# Dependencies of dependencies are the newest but for pyparsing: 3.3 deprecates names that matplotlib
# 3.8 uses, and the tests turn warnings into errors.
MINIMUM_REQUIREMENTS := '.[test]' 'pyparsing==3.2.*'
MINIMUM := .venv-minimum
MINIMUM_READY := $(MINIMUM)/.ready
EXPORTERS := .venv-exporters
# Trained files that pages of the documentation train again; the package needs nothing else for this.
READER := rapidocr-onnxruntime==1.4.4
EXPORTERS_READY := $(EXPORTERS)/.ready
FLOWER := .venv-flower
FLOWER_READY := $(FLOWER)/.ready
GPU := .venv-gpu
GPU_READY := $(GPU)/.ready
GPU_EXTRA ?= cuda13
GPU_RUNTIME_cuda13 := onnxruntime-gpu[cuda,cudnn]>=1.31
GPU_RUNTIME_cuda12 := onnxruntime-gpu[cuda,cudnn]==1.26.*
# Where to find the CPU build of torch, if the package index has only that for CUDA.
TORCH_INDEX ?=

PYTEST := $(BIN)/pytest -n $(WORKERS) --dist worksteal --durations=20
# Workers that each have threads for all cores wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# A run of all tests draws numbers of its own, and leaves the number of threads to the libraries.
ALL_TESTS = TEST_SEED=$(SEED) $(PYTEST) --hypothesis-seed=$(SEED) -m ""
# OpenBLAS's kernels for the oldest and for common x86-64 processors; it has no such choice elsewhere.
OLDEST_KERNEL := $(if $(filter x86_64,$(shell uname -m)),Prescott)
OTHER_KERNELS := $(if $(OLDEST_KERNEL),$(OLDEST_KERNEL) Haswell)
# Tests whose results are sums, which each kernel of BLAS adds up in an order of its own.
NUMERICAL := tests/backend tests/curvature tests/engine tests/layers tests/losses tests/autodiff \
	tests/runtime tests/export tests/training tests/distributed $(patsubst %,tests/test_%.py,docs exactness half_precision two_heads)

# $(call environment,FOLDER,REQUIREMENTS): a virtual environment of its own. Some systems ship venv
# without its bundled pip; there the system's pip installs into the environment.
define environment
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found; set PYTHON=/path/to/python." >&2; exit 2; }
	rm -rf $(1)
	$(PYTHON) -m venv $(1) 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(1)
	if $(1)/bin/python -m pip --version >/dev/null 2>&1; \
	then $(1)/bin/python -m pip install --quiet $(2); \
	else $(PYTHON) -m pip --python $(1)/bin/python install --quiet $(2); fi
endef

.PHONY: help setup format lint types single suite site other-kernel test test-all web docs coverage test-minimum test-exporters \
	test-gpu measure-gpu test-web test-flower fuzz demo clean

help:
	@sed -n '2,12s/^# *//p' Makefile

setup: $(READY)

# The stamp makes a second call quick: the environment is rebuilt only when the requirements change.
$(READY): pyproject.toml
	$(call environment,$(VENV),--editable '.[dev]')
	touch $@

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

# Phases that each keep one core busy.
SINGLE := other-kernel types site
single: $(READY)
	@$(MAKE) --no-print-directory --output-sync=target -j$(WORKERS) $(SINGLE)

# The tests without the marker nightly: pyproject.toml leaves these out unless -m is given.
suite: $(READY)
	$(ONE_THREAD) $(PYTEST) --hypothesis-seed=0

# A warning, such as a link without a target, is an error. The gate executes no tutorials.
site: $(READY)
	NO_MKDOCS_2_WARNING=1 EXECUTE_TUTORIALS=false $(BIN)/mkdocs build --strict --quiet --site-dir $(VENV)/site

# The package for JavaScript, with its tools and the runtime from npm.
web:
	cd web && npm ci --ignore-scripts --no-audit --no-fund --silent && npm run --silent build

docs: $(READY)
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory web; \
		else echo "without npm, the page that trains in a browser has no runtime"; fi
	@$(BIN)/python -m pip install --quiet --no-deps $(READER) || echo "without $(READER), the pages that train its files are not executed"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

other-kernel: $(READY)
ifdef OLDEST_KERNEL
	OPENBLAS_CORETYPE=$(OLDEST_KERNEL) $(ONE_THREAD) $(BIN)/pytest -q -m "rounding and not nightly" $$(grep -rl --include="*.py" mark.rounding tests)
else
	@echo "skipped: OpenBLAS has such a kernel for x86-64 alone, this is $(shell uname -m)"
endif

# The gate. CONTRIBUTING.md describes its phases.
PHASES := setup lint single suite
test:
	@times=; for phase in $(PHASES); do \
		start=$$(date +%s); $(MAKE) --no-print-directory $$phase || exit; \
		times="$$times\n$$(printf '%6d s  %s' $$(($$(date +%s) - start)) $$phase)"; \
	done; printf "$$times\n"

# Before a release, and each night. The numbers that tests draw are new unless SEED is given.
test-all: lint types
	@echo "make test-all SEED=$(SEED) repeats this run"
	$(ALL_TESTS)
	$(foreach kernel,$(OTHER_KERNELS),OPENBLAS_CORETYPE=$(kernel) $(ALL_TESTS) $(NUMERICAL) &&) true
	$(MAKE) docs
	$(MAKE) fuzz SECONDS=300 SEED=$(SEED)

coverage: $(READY)
	$(ONE_THREAD) $(PYTEST) --cov=kfac_engine --cov-report=term --cov-report=html:coverage

$(MINIMUM_READY): PYTHON := $(MINIMUM_PYTHON)
$(MINIMUM_READY): pyproject.toml
	$(call environment,$(MINIMUM),uv)
	$(MINIMUM)/bin/uv pip install --quiet --python $(MINIMUM)/bin/python --resolution lowest-direct \
		--editable $(MINIMUM_REQUIREMENTS)
	touch $@

test-minimum: $(MINIMUM_READY)
	$(ONE_THREAD) $(MINIMUM)/bin/pytest -n $(WORKERS) --dist worksteal

# An environment of its own, with the frameworks whose exporters are under test: about 2 GB.
$(EXPORTERS_READY): pyproject.toml tests/exporters/requirements.txt
	$(call environment,$(EXPORTERS),$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		--requirement tests/exporters/requirements.txt --editable .)
	touch $@

test-exporters: $(EXPORTERS_READY)
	$(ONE_THREAD) $(EXPORTERS)/bin/python -m pytest tests/exporters -q -n $(WORKERS) $(EXPORTERS_ARGS)

# An environment of its own: CuPy for CUDA 13, or GPU_EXTRA=cuda12. Sanitizers slow a kernel down a
# hundredfold; they get the parity of primitives on small arrays.
$(GPU_READY): pyproject.toml
	$(call environment,$(GPU),--editable '.[dev]' '.[$(GPU_EXTRA)]')
	$(GPU)/bin/python -m pip uninstall --quiet --yes onnxruntime
	$(GPU)/bin/python -m pip install --quiet '$(GPU_RUNTIME_$(GPU_EXTRA))'
	touch $@

test-gpu: $(GPU_READY)
	@$(GPU)/bin/python -c 'import sys; from kfac_engine.backend.select import choice_reason as why; \
		found = why("cupy"); print(found); sys.exit(found.startswith("none"))'
	$(GPU)/bin/pytest -m gpu
	@for tool in memcheck racecheck; do \
		if command -v compute-sanitizer >/dev/null; \
		then compute-sanitizer --tool $$tool --error-exitcode 1 \
			$(GPU)/bin/python -m pytest -m gpu -q tests/backend || exit 1; \
		else echo "$$tool: compute-sanitizer is not installed"; fi; done

# $(call limited,SECONDS,NAME,COMMAND): run a command, keep what it prints, and note whether it failed.
MEASURED := gpu-measured
define limited
	@echo "== $(2)"; timeout --kill-after=10 $(1) bash -o pipefail -c '$(3) 2>&1 | tee $(MEASURED)/$(2).log' \
		|| echo "$(2)" >> $(MEASURED)/failed
endef
SANITIZED := $(GPU)/bin/python -m pytest -m gpu -q tests/backend/test_primitives_parity.py

# In the order of their value: docs/gpu.md says what each command decides.
measure-gpu: $(GPU_READY)
	@mkdir -p $(MEASURED); rm -f $(MEASURED)/failed
	$(call limited,180,tests,$(GPU)/bin/pytest -q -m gpu tests/backend)
	$(call limited,240,tune,$(GPU)/bin/kfac-engine bench --suite gpu --tune $(MEASURED)/tuned.json)
	$(call limited,300,bench,$(GPU)/bin/kfac-engine bench --suite gpu --json $(MEASURED)/gpu.json)
	$(call limited,90,racecheck,compute-sanitizer --tool racecheck --error-exitcode 1 $(SANITIZED))
	$(call limited,90,memcheck,compute-sanitizer --tool memcheck --error-exitcode 1 $(SANITIZED))
	@if [ -e $(MEASURED)/failed ]; then echo "failed:"; cat $(MEASURED)/failed; exit 1; fi

# What the demo needs, and no compilers or test tools.
$(DEMO_READY): pyproject.toml
	$(call environment,$(DEMO),--editable '.[plot]')
	touch $@

test-web: $(READY) web
	NO_MKDOCS_2_WARNING=1 EXECUTE_TUTORIALS=false $(BIN)/mkdocs build --strict --quiet --site-dir $(VENV)/site
	SITE=$(abspath $(VENV)/site) $(ONE_THREAD) $(BIN)/pytest -q -m "" tests/web

# Flower and its dependencies are in an environment of their own.
$(FLOWER_READY): pyproject.toml
	$(call environment,$(FLOWER),--editable '.[test]' 'flwr>=1.42')
	touch $@

test-flower: $(FLOWER_READY)
	$(ONE_THREAD) $(FLOWER)/bin/python -m pytest -q -m "" tests/training_files/test_flower.py

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz.campaign --seconds $(SECONDS) --seed $(SEED)

demo: $(DEMO_READY)
	$(DEMO)/bin/python -m kfac_engine demo --out demo-output

clean:
	rm -rf web/dist $(VENV) $(DEMO) $(MINIMUM) $(EXPORTERS) $(FLOWER) $(GPU) build dist site coverage demo-output $(MEASURED) *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
