# The words people run; CI runs nothing else.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0

WORKERS ?= 2
HOURS ?= 8
SEED ?= 1000

.PHONY: setup check lint types contracts unit test pythons soak demo bench carry kvikio clean

setup: $(VENV)/.ready

# torch first: whatever depends on it would otherwise choose its build. Where the index in use has CUDA's build by default, as
# PyPI has for Linux, `make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu` takes the CPU's, gigabytes smaller.
TORCH_INDEX ?=
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

contracts: setup
	$(BIN)/lint-imports --no-cache

# Processes that tests start find the package compiled, wherever Python was told to keep nothing.
unexport PYTHONDONTWRITEBYTECODE

unit: setup
	$(BIN)/pytest -m "not slow and not soak" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

check: lint types contracts unit

# A file's tests share what is slow to make, so a file stays with one worker. The long ones come first (tests/conftest.py).
test: lint types contracts
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# Types, unit tests and the wheel alone in newer Pythons, each with an environment of its own; one that is not found is left out.
PYTHONS ?= 3.12 3.13
pythons:
	@for version in $(PYTHONS); do \
	    if ! python$$version -c '' 2>/dev/null; then echo "python$$version is not found: left out"; continue; fi; \
	    bin=.venv-$$version/bin; \
	    $(MAKE) --no-print-directory PYTHON=python$$version VENV=.venv-$$version setup && \
	    $$bin/mypy --python-version $$version && $$bin/pytest -m "not slow and not soak" && $$bin/pytest -m soak tests/test_wheel.py \
	    || exit 1; \
	done

# All of what `make test` tries a sample of (its summary says how many of how many), and signals at 50 moments of every command;
# then crash states and simulations of new seeds, HOURS long, from SEED on.
soak: setup
	$(BIN)/pytest -m soak
	PARAMSTORE_SIGNAL_TRIES=50 PARAMSTORE_SIGNAL_SEED=$(SEED) $(BIN)/pytest tests/cli/test_signals.py
	$(BIN)/python -m paramstore_testkit.soak --hours $(HOURS) --seed $(SEED)

demo: setup
	$(BIN)/paramstore demo

bench: setup
	$(BIN)/python bench/bench_tiers.py

# What the battery for a CUDA device needs on a machine without a network; `python3 bench/carry_device.py install` sets it up there.
carry: setup
	$(BIN)/python bench/carry_device.py make .carry

# kvikio and what it loads, without the CUDA toolkit: its test reads a real volume then, on a machine without a GPU.
kvikio: setup
	.ci/kvikio $(BIN)/python .kvikio

clean:
	rm -rf $(VENV) $(PYTHONS:%=.venv-%) demo-run .carry .kvikio .mypy_cache .ruff_cache .pytest_cache
