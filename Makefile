# Each target makes .venv when it is missing or when pyproject.toml has changed. Any python3 >= 3.10 will do.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench

demo: $(STAMP)
	$(BIN)/scanvas demo --out runs/demo

test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(STAMP)
	$(BIN)/scanvas bench ops
	$(BIN)/scanvas bench models

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("scanvas needs Python 3.10 or newer, and $(PYTHON) is " + sys.version) if sys.version_info < (3, 10) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)
