# Two commands for everyone: `make demo`, `make test`. Each makes its own environment on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SIDE := .cache
TRITONS := $(SIDE)/triton-3.6.0 $(SIDE)/triton-3.7.1
NODE := tests/conformance/node
CLIENTS := $(NODE)/node_modules/.package-lock.json

.DEFAULT_GOAL := help
.PHONY: help demo test lint types quick bench browser conformance wheel clean

help: ## list targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: $(VENV)/.base ## install, fetch SmolLM2-135M, serve it, stream an answer through HTTP
	@$(BIN)/python examples/demo.py

# Without the last option files of few, long tests would come last and leave a worker idle.
test: $(VENV)/.dev $(TRITONS) $(CLIENTS) lint types ## everything that CI runs
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.dev ## style and import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

quick: $(VENV)/.dev ## the tests that need no model: under a minute
	$(BIN)/python -m pytest -q tests/core tests/kv tests/scheduler tests/kernels

bench: $(VENV)/.dev ## beside transformers, in one run; minutes
	$(BIN)/metainfer bench offline smollm2-135m --against transformers

conformance: $(VENV)/.dev $(CLIENTS) ## other people's clients and tools, each in an environment of its own; many minutes
	$(BIN)/python -m pytest -q tests/conformance
	$(BIN)/python tests/conformance/heavy/run.py
	$(BIN)/python tests/conformance/heavy/prometheus.py

browser: $(VENV)/.dev ## the live page in Debian's chromium, driven by node (npm registry); minutes
	$(BIN)/python tests/browser/drive.py

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(VENV)/bin/python pyproject.toml
	$(PIP) install -q -e ".[demo]"
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml
	$(PIP) install -q -e ".[dev]"
	@touch $@ $(VENV)/.base

# The Triton releases that CUDA builds of torch 2.11 and 2.12+ pin; kernels are compiled with both.
$(SIDE)/triton-%: | $(VENV)/bin/python
	$(PIP) install -q --no-deps --target $@.part triton==$*
	@mv $@.part $@

# Seconds, by hashes. Without npm or its registry the tests of these clients are skipped, and say so.
$(CLIENTS): $(NODE)/package-lock.json
	@(cd $(NODE) && timeout 120 npm ci --silent --ignore-scripts --no-audit --no-fund) \
		|| { rm -rf $(NODE)/node_modules; echo "no clients for Node: npm ci did not run"; }

wheel: $(VENV)/bin/python ## build dist/*.whl, as the Containerfile takes it
	rm -rf dist build
	$(PIP) wheel -q --no-deps -w dist .

clean: ## remove environment and caches
	rm -rf $(VENV) $(SIDE) .stamps .pytest_cache .mypy_cache .ruff_cache
