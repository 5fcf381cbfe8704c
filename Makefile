# Each target makes .venv when it is missing or when pyproject.toml has changed. Any python3 >= 3.10 will do.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench notebooks notebooks-stored docs

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

# One thread: the models are tiny, and with two threads on busy cores every small operation waits for one of them.
notebooks: $(STAMP)
	cd notebooks && HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 ../$(BIN)/jupyter-execute --timeout=240 *.ipynb

# The same, and keep what they print and draw.
notebooks-stored: $(STAMP)
	cd notebooks && HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 ../$(BIN)/jupyter-execute --timeout=240 --inplace *.ipynb

docs: $(STAMP) $(VENV)/.docs
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("scanvas needs Python 3.10 or newer, and $(PYTHON) is " + sys.version) if sys.version_info < (3, 10) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)
