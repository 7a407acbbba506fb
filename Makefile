# make serve   talk to a GLM-MoE-DSA model      make test   everything that is checked      make help   the rest
# Needs Python 3.11+ with pip, and make. Everything lives in .venv; nothing is installed outside this folder.

PYTHON ?= python3
VENV   ?= .venv
POLICY ?= sglang
PORT   ?= 30000
ARGS   ?=
WORKERS ?= 2
BENCH  ?= $(filter-out common gpu_check __init__,$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/*.py)))
BENCH_ARGS ?= --quick

PY     := $(VENV)/bin/python
SHARED := $(if $(GLM_RUNTIME_SHARED),$(GLM_RUNTIME_SHARED),../shared)

MAKEFLAGS += --no-print-directory
.PHONY: help serve test lint format golden bench clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make serve [POLICY=$(POLICY)] [PORT=$(PORT)] [ARGS='--flag value ...']"
	@echo "                      install, build the embedded model, serve it, send a first request"
	@echo "make test [ARGS=...] [WORKERS=2]"
	@echo "                      lint, types, golden vectors, all tests (ARGS go to pytest; each worker runs a server)"
	@echo "make lint             ruff and mypy only"
	@echo "make format           let ruff format the sources"
	@echo "make golden           golden vectors of $(SHARED)/golden only"
	@echo "make bench [BENCH='a b'] [BENCH_ARGS='']"
	@echo "                      benchmarks, quick form; figures as JSON in .bench/"
	@echo "make clean            caches and build folders; make distclean: .venv too"
	@echo "PYTHON=python3.12 chooses the interpreter for .venv (3.11 or newer)"

# The version is checked before the environment is made, and a half-made environment is taken away again.
$(PY):
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) here: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$$($(PYTHON) --version) is too old, 3.11 or newer is needed: make PYTHON=python3.11"; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: pyproject.toml scripts/install.py | $(PY)
	@$(PY) scripts/install.py --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml scripts/install.py | $(PY)
	@$(PY) scripts/install.py --editable '.[dev]'
	@touch $(VENV)/.installed $@

serve: $(VENV)/.installed
	@exec $(PY) scripts/serve.py --policy $(POLICY) --port $(PORT) $(ARGS)

lint: $(VENV)/.installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.installed-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

golden: $(VENV)/.installed-dev
	@if [ -d "$(SHARED)/golden" ]; then OMP_NUM_THREADS=1 $(PY) -m tests.golden "$(SHARED)/golden"; \
	else echo "golden vectors: left out, no $(SHARED)/golden here"; fi

test: lint golden
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --durations=25 $(ARGS)

bench: $(VENV)/.installed-dev
	@mkdir -p .bench; failed=; for name in $(BENCH); do echo "== $$name"; \
	    OMP_NUM_THREADS=1 $(PY) -m benchmarks.$$name $(BENCH_ARGS) --json .bench/$$name.json || failed="$$failed $$name"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

clean:
	rm -rf build dist *.egg-info .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
