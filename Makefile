# Everything runs in .venv, made here; constraints.txt pins what is installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INTEGRATIONS := $(VENV)/.integrations

.PHONY: demo test test-slow test-integrations faults fuzz check bench results clean

SEEDS ?= 150

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(INTEGRATIONS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,integrations]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/offbeat compare experiments/demo.toml --out runs/demo --overwrite
	$(BIN)/offbeat train experiments/demo_live.toml --out runs/demo-live --overwrite
	$(BIN)/python bench/straggler.py --demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m slow

test-integrations: $(INTEGRATIONS)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m integration

faults: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "faults or not faults" tests/faults
	$(BIN)/python tests/faults/test_matrix.py

fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz.py --seeds $(SEEDS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED)
	$(BIN)/python bench/simulator.py --scaling
	$(BIN)/python bench/batching.py
	$(BIN)/offbeat data get cifar10
	$(BIN)/python bench/simulators.py
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/round_trips.py
	$(BIN)/python bench/faults.py
	$(BIN)/python bench/soak.py --minutes 10
	$(BIN)/python bench/straggler.py
	$(BIN)/python bench/transports.py
	$(BIN)/python bench/strangers.py
	$(BIN)/python bench/prediction.py
	$(BIN)/python bench/acid.py
	$(BIN)/python bench/second_moments.py
	$(BIN)/python bench/bytes.py
	$(BIN)/python bench/goodput.py
	$(BIN)/python bench/compression.py

results: $(INSTALLED)
	$(BIN)/python docs/draw_results.py
	$(BIN)/python docs/draw_settings.py

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
