# Everything a newcomer needs: `make run`, `make test`. Both set up .venv first and skip what is already done.
PYTHON ?= python3
# how pip gets torch; the README says how to ask for the CPU build
TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
# one torch thread a process: more are slower for nets of this size, and results stay the same everywhere
export OMP_NUM_THREADS := 1
# modules are compiled once, not at every start
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run test test-slow test-flower bench check docs dist clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,fast,privacy,flower,export,track,wandb,metrics,lora,tune]"
	touch $@

run: setup
	$(BIN)/fedloom run

test: setup
	$(BIN)/pytest -n 2

test-slow: setup
	$(BIN)/pytest -n 2 --dist worksteal -m slow

# real fleets and Ray on this machine alone, with every method: twenty minutes and more; ends all that it starts
test-flower: setup
	$(BIN)/pytest -m "slow or at_length" tests/flower tests/deploy

bench: setup
	$(BIN)/python -m benchmarks

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# the documentation site in site/; open site/index.html
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# wheel and sdist in dist/, then the wheel in a fresh environment without the repository: it runs the demo
dist: setup
	rm -f dist/fedloom-*
	$(BIN)/python -m build --no-isolation
	FEDLOOM_DIST=dist TORCH="$(TORCH)" $(BIN)/pytest -m "slow or not slow" tests/packaging/test_dist.py

clean:
	rm -rf $(VENV) artefacts .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist site
