# Each target works on a fresh machine with Python 3.11 and git: it makes .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
NPROC ?= 8
CONFIG ?= template/base_config.json
export OMP_NUM_THREADS ?= 1

.PHONY: help setup train test parity lint schema docs bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11; try make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv || { echo "cannot make .venv; on Debian: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

setup: $(STAMP) ## make .venv and install requirements.txt into it

train: $(STAMP) ## train a tiny Llama on the sources of Python's standard library, on the CPU, in about 3 minutes
	$(BIN)/torchrun --nproc_per_node $(NPROC) train.py --config $(CONFIG) $(ARGS)
ifeq ($(CONFIG) $(ARGS),template/base_config.json )
	$(BIN)/python generate.py --checkpoint runs/quickstart --prompt "def " --temperature 0.7 --top_k 40
endif

test: $(STAMP) ## run the tests
	$(BIN)/python -m pytest -q $(ARGS)

parity: $(STAMP) ## write docs/parity.md, a grid of layouts beside one process, and run the tests that take longer
	$(BIN)/python -m tests.parity
	$(BIN)/python -m pytest -q -m parity $(ARGS)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

schema: $(STAMP) ## write the JSON schema of the config, for editors
	$(BIN)/python train.py --schema > template/config.schema.json

docs: $(STAMP) ## run what README.md and docs/ run, and write what it prints and draws into them (ARGS=--fast: no slow ones)
	$(BIN)/python -m docs.make $(ARGS)

bench: $(STAMP) ## speed and memory beside transformers and torch's own parallelism
	$(BIN)/python -m benchmarks.single
	$(BIN)/python -m benchmarks.data_parallel
	$(BIN)/python -m benchmarks.tensor_parallel
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.schedules
	$(BIN)/python -m benchmarks.context_parallel
	$(BIN)/python -m benchmarks.checkpoint

clean: ## remove .venv and caches of the tools (not the outputs of runs)
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache
