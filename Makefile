# Everything here works from a bare checkout: Python 3.11, pip, make and gcc; no environment needs to be active.
#   make quickstart     the main job on the embedded teacher, under runs/quickstart
#   make test           lint, types and tests
#   make test-readers   exported artifacts loaded by transformers and llama.cpp
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: quickstart test test-readers lint format clean

PYTHON ?= python3.11
JOBS ?= 2
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME
export PIP_DISABLE_PIP_VERSION_CHECK := 1

venv := .venv/bin/python
readers := .venv-readers/bin/python
INSTALL := -m pip install --quiet --constraint constraints.txt --editable

quickstart: .venv/.installed
	$(venv) -m compress run recipes/quickstart.toml

test: lint
	$(venv) -m pytest -q -n $(JOBS)

test-readers: .venv-readers/.installed
	$(readers) -m pytest -q tests/readers

lint: .venv/.installed-dev
	$(venv) -m ruff check
	$(venv) -m ruff format --check
	$(venv) -m mypy

format: .venv/.installed-dev
	$(venv) -m ruff check --fix
	$(venv) -m ruff format

clean:
	rm -rf .venv .venv-readers .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist

# A stamp is newer than what it was installed from, so nothing is installed twice.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(venv) $(INSTALL) .
	touch $@

.venv/.installed-dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(venv) $(INSTALL) '.[dev]'
	touch .venv/.installed $@

# torch comes first and alone: a resolver that considers another version of it downloads gigabytes.
.venv-readers/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-readers
	$(readers) -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(readers) $(INSTALL) '.[dev,readers]'
	touch $@
