# `make quickstart` and `make test` set everything up by themselves.

# What is imported is compiled then: a fifth of what is installed.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
WORKDIR ?= runs/quickstart

.PHONY: quickstart docs test lint format clean

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $$($(PYTHON) --version) found: diloco needs Python 3.11 or" \
	    "newer; install one and run 'make PYTHON=python3.11 ...'" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@# Two halves side by side, as each keeps one core busy; the last one checks.
	@for half in 0 1; do \
	  awk "/==/ && NR % 2 == $$half" constraints.txt > $(VENV)/half$$half; \
	  $(PIP) --no-deps --requirement $(VENV)/half$$half & \
	done; wait
	@# Meanwhile what processes that begin together import is compiled, once.
	@$(BIN)/python -c 'import flax.linen, grain, matplotlib.pyplot, optax' & \
	  $(BIN)/python -c 'import orbax.checkpoint, pandas, ray, scipy.stats' & \
	  $(PIP) --constraint constraints.txt \
	    --editable '.[test,workbench,notebook,ray,wandb,docs]'; \
	  made=$$?; wait; exit $$made
	@touch $@

quickstart: $(READY)
	$(BIN)/diloco train --config=experiments/configs/quickstart.py \
	  --workdir=$(WORKDIR)

# Types are checked in what whole runs leave idle. pytest has the last word.
test: $(READY)
	@nice $(MAKE) --no-print-directory lint & lint=$$!; \
	  $(BIN)/python -m pytest --numprocesses=3 \
	    --dist=loadfile --no-loadscope-reorder; tests=$$?; \
	  wait $$lint || { echo "make lint failed: see above" >&2; exit 1; }; \
	  exit $$tests

docs: $(READY)
	$(BIN)/sphinx-build -q -W --keep-going docs build/site

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
