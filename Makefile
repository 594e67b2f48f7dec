# Each target works on a fresh machine with git and Python 3.11 to 3.14, or uv: the first one creates .venv. (Only gpu
# does not: if there is no .venv, it takes the Python, and so the torch, that a machine with GPUs comes with.)
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
CONFIG ?= template/base_config.json
CHROMIUM ?= chromium
export CHROMIUM
export OMP_NUM_THREADS ?= 1
ifeq ($(shell uname),Darwin)
# By default, gloo takes the interface of the machine's name, which a Mac may not know.
export GLOO_SOCKET_IFNAME ?= lo0
endif

.PHONY: help steps setup train check test slow parity pages oldest newest fuzz mutants lint schema docs bench gpu clean site playground-test playground-pictures
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

UV := $(shell command -v uv)
PYTHONS := >=3.11,<3.15
$(BIN)/python:
ifdef UV
	uv venv --quiet --seed --python "$(if $(filter file,$(origin PYTHON)),$(PYTHONS),$(PYTHON))" .venv
else
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { \
		echo "requirements.txt needs Python 3.11 to 3.14, which $(PYTHON) is not; try make PYTHON=python3.14"; exit 1; }
	$(PYTHON) -m venv .venv || { echo "cannot create .venv; on Debian: apt install python3-venv"; exit 1; }
endif

# Without a GPU, the CPU build of torch is installed, because the one for GPUs is several times as large. Without NumPy,
# torch warns on each rank. If the index of CPU builds cannot be reached, the second command takes the default build.
INDEX := $(if $(shell command -v nvidia-smi),,--extra-index-url https://download.pytorch.org/whl/cpu $(if $(UV),,--retries 1))
PIP := $(if $(UV),uv pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet --disable-pip-version-check)
$(BIN)/torchrun: | $(BIN)/python
	-$(PIP) --no-deps $(INDEX) $$(grep ^torch== requirements.txt)
	$(PIP) $$(grep -E '^(torch|numpy)==' requirements.txt)

steps: | $(BIN)/torchrun ## train a tiny Llama with 4D parallelism on 16 ranks, with torch alone
	$(BIN)/torchrun --nproc_per_node 16 -m steps.s9_cp --dp 2 --pp 2 --cp 2 --tp 2

$(STAMP): requirements.txt | $(BIN)/torchrun
	$(PIP) -r requirements.txt --editable .
	@touch $@

setup: $(STAMP) ## create .venv, install requirements.txt into it, and a link to this folder's packages

train: $(STAMP) ## train a tiny Llama on Python's standard library, without a GPU, in 3 minutes
	$(BIN)/python train.py --config $(CONFIG) $(ARGS)
ifeq ($(CONFIG) $(ARGS),template/base_config.json )
	$(BIN)/python generate.py --checkpoint runs/quickstart --prompt "def main(" --temperature 0.7 --seed 1
endif

check: lint ## lint, and run the tests that start no processes
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not processes" $(ARGS)

test: $(STAMP) ## run the tests (5 minutes on 2 cores)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

slow: $(STAMP) ## run the long tests, apart from the pages' commands
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m slow --ignore tests/docs $(ARGS)

parity: $(STAMP) ## compare all layouts with one process, write docs/reference/parity.csv
	$(BIN)/python -m conformance.grid $(ARGS)

pages: $(STAMP) ## run the slow commands of all pages, and the long tests of the programs on them
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m slow tests/docs $(ARGS)

.venv-%/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) -m tests.support.versions $*)
	@touch $@

oldest: .venv-oldest/.installed ## run make gpu on the CPU and the tests with the oldest versions that pyproject.toml allows
newest: .venv-newest/.installed ## the same with the newest versions; rm -r .venv-newest looks for newer ones
oldest newest:
	.venv-$@/bin/python -m benchmarks.gpu --tiny
	.venv-$@/bin/python -m pytest -q -n 2 --dist loadfile $(ARGS)

fuzz: $(STAMP) ## look for a case that differs from transformers, for 10 minutes (ARGS="--minutes 60 --seed 1")
	$(BIN)/python -m tests.fuzz --minutes 10 $(ARGS)

mutants: $(STAMP) ## plant mistakes, and list which check finds each (ARGS="--only NAME", --room ROOM)
	$(BIN)/python -m conformance.mutants $(ARGS)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

schema: $(STAMP) ## write the JSON schema of the config, for editors
	$(BIN)/python train.py --schema > template/config.schema.json

docs: $(STAMP) ## run the pages' commands, update their outputs (ARGS=--fast: fast ones only)
	$(BIN)/python -m docs.programs.make $(ARGS)

bench: $(STAMP) ## compare speed and memory with transformers and with torch's own parallelism
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.schedules
	$(BIN)/python -m benchmarks.checkpoint

gpu: ## train, generate, and measure speed and memory on this machine's GPU (ARGS="--only trace memory")
	$(if $(wildcard $(STAMP)),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(ARGS)

site: $(STAMP) ## build the website: pages, playground, notebooks, in site/ (ARGS="--pyodide DIR": without Pyodide's CDN)
	$(BIN)/python -m docs.site.build $(ARGS)

playground-test: $(STAMP) playground-browser ## test the playground and the website in a headless Chromium
	node --test playground/tests

playground-pictures: $(STAMP) playground-browser ## take the pictures of docs/playground.md in a headless Chromium
	node playground/tests/pictures.mjs

.PHONY: playground-browser
playground-browser: $(STAMP)
	@for program in node npm $(CHROMIUM); do command -v $$program > /dev/null || { echo "the playground's tests need $$program; on Debian: apt install nodejs npm chromium (CHROMIUM=PROGRAM names another one)"; exit 1; }; done
	@test -d playground/node_modules || npm install --prefix playground --no-audit --no-fund --no-package-lock
	$(BIN)/python -m docs.site.build --pyodide playground/node_modules/pyodide

clean: ## remove .venv and the tools' caches, not the outputs of runs
	rm -rf .venv .venv-oldest .venv-newest .pytest_cache .ruff_cache .mypy_cache build picotron.egg-info
