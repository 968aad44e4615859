# One command each. A virtual environment is made on first use; `make clean` takes it away.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test test-unit test-gpu lint bench bench-parallel bench-gpu bench-planning figures clean
.DEFAULT_GOAL := help

help:
	@echo "make demo | test | test-gpu | lint | bench | bench-parallel | bench-gpu | bench-planning | figures | clean"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,lint,plot]"
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

# Two tests at a time: those of whole clusters wait more than they compute.
test: test-unit
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/cluster tests/stores tests/gpu

test-unit: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/unit

# Both need a GPU: without one the tests are skipped, and the benchmark says that there is none.
test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/gpu

bench-gpu: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/gpu_logging.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torchft has wheels for few platforms; replication.py says so where it is missing, and goes without.
$(VENV)/.installed-bench: $(VENV)/.installed-dev
	-$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	@touch $@

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/replication.py
	$(BIN)/python benchmarks/parallel_recovery.py

bench-parallel: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/parallel_recovery.py

# How long grouping takes, and whether a simulated training takes as long as an executed one.
bench-planning: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/simulated.py

# The paper's figures 9 to 11 and table 3, measured here: PNG and JSON in benchmarks/figures.
figures: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/figures.py

clean:
	rm -rf $(VENV) build *.egg-info runs
