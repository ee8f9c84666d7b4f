# make setup needs python3 (3.11 or later), pip, gcc and git. Arguments for pip: make setup PIP_ARGS="..."
PYTHON ?= python3
BIN := .venv/bin
PYTEST_ARGS ?=
export PIP_ARGS

.PHONY: setup lint docs test test-all test-fast fidelity trainers faults fuzz soak screenshots demo clean

setup:  ## the CPU environment in .venv (nothing to do while its inputs are the same)
	$(PYTHON) scripts/setup_cpu.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup  ## docs/cli.md, docs/configuration.md and docs/metrics.md from the code
	$(BIN)/python scripts/make_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

test: lint  ## what runs without a GPU, real servers included
	$(BIN)/python -m pytest -m "not thorough" $(PYTEST_ARGS)

test-all: lint  ## more cases of each kind, too
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: setup  ## no server, nothing slow
	$(BIN)/python -m pytest -m "not server and not slow" $(PYTEST_ARGS)

FIDELITY_ARGS ?=
fidelity: setup  ## every architecture of tests/fidelity: eager, samples compiled and on two workers, traces of other layouts; about 25 minutes
	PYTHONPATH=tests $(BIN)/python -m fidelity $(FIDELITY_ARGS)
ifeq ($(FIDELITY_ARGS),)
	PYTHONPATH=tests $(BIN)/python -m fidelity --compiled
	PYTHONPATH=tests $(BIN)/python -m fidelity --tp 2
	PYTHONPATH=tests $(BIN)/python -m fidelity --layouts
endif

trainers: setup  ## trainers of 2 and 4 ranks in every layout against dense and MoE servers; about 5 minutes
	PYTHONPATH=tests $(BIN)/python -m trainers

MINUTES ?= 5
fuzz: setup  ## decoders, notifications, channel, worker, routes and a real server get what nobody would send; MINUTES=5
	FUZZ_MINUTES=$(MINUTES) $(BIN)/python -m pytest tests/test_fuzz.py -q --timeout=0

screenshots: setup  ## drive the live page and the timeline in Chromium (apt-get install chromium), check them, write docs/images
	$(BIN)/python scripts/screenshots.py

ARGS ?=
faults: setup  ## kill and stop every process at every stage of an update; a table, ARGS=--write puts it into docs/faults.md
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m faults $(ARGS)

SOAK_ARGS ?=
soak: setup  ## requests, pushes and faults without a break for MINUTES=5; ends with 1 at a failure, a wrong answer or a leak
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m soak $(MINUTES) $(SOAK_ARGS)

demo: setup
	$(BIN)/python examples/demo.py

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
