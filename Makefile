# One-word tasks. Each makes the virtual environment first and installs everything in it, so any of them works on a fresh clone.
.PHONY: help install demo test lint types format proto clean
.DEFAULT_GOAL := help

# The first Python >= 3.11 that can make a virtual environment; `make test PYTHON=/path/to/python3` chooses another.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

help:
	@echo "make demo    train, convert, serve and measure the digits classifier; writes runs/demo/report.html"
	@echo "make test    the whole test suite, as CI runs it"
	@echo "make lint    ruff (style and errors) and hadolint (Dockerfile)"
	@echo "make types   mypy, strict"
	@echo "make format  rewrite the sources in the project's format"
	@echo "make proto   regenerate protos/*_pb2.py and their stubs from the .proto files"
	@echo "make clean   remove the environment and what runs have written"

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with the venv module was found; install one or run: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $(READY)

install: $(READY)

demo: $(READY)
	$(BIN)/halfserve demo

# The suite starts hundreds of processes: each would compile the project anew where the environment forbids to keep what is compiled.
test: export PYTHONDONTWRITEBYTECODE =
# In two runs: data loading forks, and a fork of a process in which gRPC's threads run may hang.
test: $(READY)
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal --ignore=tests/serve --ignore=tests/end_to_end
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal tests/serve tests/end_to_end

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(READY)
	$(BIN)/python -m protos.generate

clean:
	rm -rf $(VENV) runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
