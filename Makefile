# Everything runs in a virtual environment of its own: Python >= 3.11 with pip is all a machine needs.
#   make test    lint, types and tests        make demo    K-FAC on real data, with a picture
#   make lint    lint and types               make clean   remove what these make
#   make test-gpu    what needs a CUDA device, with its sanitizers where they are installed
#   make test-exporters    models written by PyTorch, transformers and scikit-learn (installs them)
# Choose the interpreter with `make PYTHON=python3.13 …`.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.DEFAULT_GOAL := help
EXPORTERS := .venv-exporters
EXPORTERS_READY := $(EXPORTERS)/.ready
GPU := .venv-gpu
GPU_READY := $(GPU)/.ready
GPU_EXTRA ?= cuda13
GPU_RUNTIME_cuda13 := onnxruntime-gpu[cuda,cudnn]>=1.28
GPU_RUNTIME_cuda12 := onnxruntime-gpu[cuda,cudnn]==1.26.*
# Where to find the CPU build of torch, if the package index has only that for CUDA.
TORCH_INDEX ?=

.PHONY: help setup format lint test test-exporters test-gpu demo clean

help:
	@sed -n '2,6s/^# *//p' Makefile

setup: $(READY)

# The stamp makes a second call quick: the environment is rebuilt only when the requirements change.
# Some systems ship venv without its bundled pip; there the system's pip installs into the environment.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found; set PYTHON=/path/to/python." >&2; exit 2; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m venv --clear --without-pip $(VENV)
	if $(BIN)/python -m pip --version >/dev/null 2>&1; \
	then $(BIN)/python -m pip install --quiet --editable '.[dev]'; \
	else $(PYTHON) -m pip --python $(BIN)/python install --quiet --editable '.[dev]'; fi
	touch $@

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n $(WORKERS)

# An environment of its own, with the frameworks whose exporters are under test: about 2 GB.
$(EXPORTERS_READY): pyproject.toml tests/exporters/requirements.txt
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found; set PYTHON=/path/to/python." >&2; exit 2; }
	rm -rf $(EXPORTERS)
	$(PYTHON) -m venv $(EXPORTERS)
	$(EXPORTERS)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		--requirement tests/exporters/requirements.txt --editable .
	touch $@

test-exporters: $(EXPORTERS_READY)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(EXPORTERS)/bin/python -m pytest tests/exporters -q -n $(WORKERS) $(EXPORTERS_ARGS)

# An environment of its own: CuPy for CUDA 13, or GPU_EXTRA=cuda12. Sanitizers slow a kernel down a
# hundredfold; they get the parity of primitives on small arrays.
$(GPU_READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found; set PYTHON=/path/to/python." >&2; exit 2; }
	rm -rf $(GPU)
	$(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python -m pip install --quiet --editable '.[dev,$(GPU_EXTRA)]'
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

demo: $(READY)
	$(BIN)/python -m kfac_engine demo --out demo-output

clean:
	rm -rf $(VENV) $(EXPORTERS) $(GPU) build dist demo-output *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
