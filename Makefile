# `make demo` and `make test` need Python >= 3.11, make, git and a package index, nothing else.
# Another interpreter: make demo PYTHON=python3.12. Options of the demo: make demo ARGS="--help".

SHELL := /bin/sh
VENV := .venv/bin
# The python3 that the user has in front goes first, then the newest one that works.
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
  $$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
  && echo $$p && break; done)
endif
ARGS ?=
# Two workers: the tests import torch, which takes about 1 GB a process.
PYTEST_ARGS ?= -n 2

.PHONY: demo test lint types unit format wheel clean python setup-demo setup-test

demo: setup-demo
	$(VENV)/fusedops demo $(ARGS)

test: setup-test
	$(MAKE) --no-print-directory lint types unit

lint:
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	@find csrc -name '*.cu' -o -name '*.cuh' 2>/dev/null | xargs -r $(VENV)/clang-format --dry-run -Werror

types:
	$(VENV)/mypy

unit:
	$(VENV)/python -m pytest $(PYTEST_ARGS)

format: setup-test
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .
	@find csrc -name '*.cu' -o -name '*.cuh' 2>/dev/null | xargs -r $(VENV)/clang-format -i

wheel: setup-test
	$(VENV)/python -m build --wheel

clean:
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

setup-demo setup-test: setup-%: python
	@$(PYTHON) scripts/setup.py $*

python:
	@test -n "$(PYTHON)" || { \
	  echo "error: no Python >= 3.11 with venv and ensurepip was found;" \
	    "python3 here is: $$(python3 --version 2>&1 || true)." >&2; \
	  echo "Install one (Debian, Ubuntu: python3 and python3-venv), or name it:" \
	    "make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); fusedops needs Python >= 3.11." >&2; \
	  exit 1; }
