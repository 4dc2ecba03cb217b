# A fresh machine needs Python 3.11 or newer and make: `make demo` shows it, `make test` checks it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# A machine with an accelerator runs with the Python whose torch was built for it.
GPU_PYTHON ?= python3

.DEFAULT_GOAL := help
.PHONY: help setup demo pp-demo test lint faults soak gpu-soak coverage mutation matrix matrix-all compose docs examples wheel canary gpu-test audit clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(INSTALLED) ## Make .venv with the tested versions

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,compose,docs]'
	touch $@

demo: setup ## Compare none with attention on the tiny model: out/demo/report.md
	$(BIN)/activation-swap compare configs/demo.yaml

pp-demo: setup ## Compare none with attention under 1F1B on two CPU processes: out/pp-demo/report.json
	$(BIN)/torchrun --nproc-per-node=2 -m activation_swap.trainer compare configs/pp-demo.yaml

lint: setup ## Lint, formatting, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## Everything that needs no accelerator
	$(BIN)/pytest -m "not level1"

faults: setup ## Faults, orders and memory bounds, one line per family with counts
	$(BIN)/pytest tests/core tests/faults -m "not level1" --families --quiet

soak: setup ## 2,000 steps with and without swap: nothing grows, equal losses
	$(BIN)/python -m tests.faults.soak

gpu-soak: ## The same for 10 minutes on an accelerator, with GPU_PYTHON
	$(GPU_PYTHON) -m tests.faults.soak --minutes 10

coverage: setup ## Every branch of what decides and refuses
	$(BIN)/nox -s coverage

mutation: setup ## Change the code that decides and refuses; list the changes no test sees
	$(BIN)/mutmut run
	$(BIN)/mutmut results

matrix: setup ## The Transformers releases that cover every fact, each in its own environment
	$(BIN)/nox -t matrix

matrix-all: setup ## Every Transformers release, recorded in docs/compatibility.json
	$(BIN)/nox -t matrix-all -- --record
	$(BIN)/python docs/generate_pages.py

compose: setup ## Every combination with other tools: out/compose/report.json and docs/combinations.md
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.compose --publish
	$(BIN)/python docs/generate_pages.py

docs: setup ## The documentation site, warnings as errors: docs/_build/html
	$(BIN)/nox -s docs

examples: setup ## Run every example on the CPU
	$(BIN)/nox -s examples

wheel: setup ## Build the wheel and test it without the source tree
	$(BIN)/nox -s wheel

canary: setup ## The newest Transformers on the index: supported, or the facts to add
	$(BIN)/nox -s canary

gpu-test: ## What needs an accelerator, with GPU_PYTHON
	$(GPU_PYTHON) -m pytest -m level1

audit: setup ## Known vulnerabilities of the tested versions (asks the package index)
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip

clean: ## Delete the virtual environment and all output
	rm -rf $(VENV) out
