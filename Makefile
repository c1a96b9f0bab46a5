# On a bare machine: `make demo` or `make test`. Needs Python >= 3.10 and make; PYTHON=… names another interpreter.

PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# What is installed, as of which setup.cfg: an older stamp is installed again into the same environment.
DEMO := $(VENV)/.installed-demo
TEST := $(VENV)/.installed-test
DOCS := $(VENV)/.installed-docs
MODELS := $(VENV)/.installed-models

# Environments of their own for the oldest versions that are supported, and for the newest there are.
OLDEST := .venv-compat/tf-2.16
NEWEST := .venv-compat/newest

# Setuptools warns of every editable installation.
INSTALL := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable

# Each worker takes tests in the order of files, so that what the tests of a file share is made once.
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist worksteal

export TF_CPP_MIN_LOG_LEVEL ?= 2
# Material for MkDocs tells of MkDocs 2 in a box of text, which is not this site's matter.
export NO_MKDOCS_2_WARNING ?= 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow test-compat test-foreign coverage bench bench-peers bench-gpu bench-papers bench-models docs lint format clean

help:
	@echo "make demo       train a 200-layer network on digits, plain and saving memory (4 minutes)"
	@echo "make test       lint, types, the fast tests, doctests, notebooks, documentation (12 minutes)"
	@echo "make test-slow  what the fast tests leave out: long tests, all cases, all examples (an hour)"
	@echo "make coverage   the lines of the library that the fast tests run"
	@echo "make test-compat  the core suite with the oldest TensorFlow and Keras, and with the newest"
	@echo "make test-foreign  tests that Keras ships, with gradients that recompute (hours; goes on where it was stopped)"
	@echo "make bench      measure every claim: python -m benchmarks --only claims --again"
	@echo "make bench-models  train networks of other libraries within budgets (hours; goes on where it was stopped)"
	@echo "make bench-papers  founding works' figures beside ours (two hours; goes on where it stopped)"
	@echo "make bench-peers  beside what TensorFlow and Keras offer, into docs/side-by-side.md (hours)"
	@echo "make bench-gpu    memory and time on a GPU, where there is one"
	@echo "make docs       build the documentation into site/"
	@echo "make lint       ruff, import-linter and mypy only; make format: let ruff rewrite"
	@echo "make venv       only make the environment; make clean: remove it, and what was built"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# Order-only: the date of the interpreter says nothing about what is installed.
$(DEMO): setup.cfg pyproject.toml | $(BIN)/python
	$(INSTALL) ".[demo]"
	@touch $@

$(TEST): setup.cfg pyproject.toml | $(BIN)/python
	$(INSTALL) ".[test]"
	@touch $(DEMO) $(DOCS) $@

$(DOCS): setup.cfg pyproject.toml | $(BIN)/python
	$(INSTALL) ".[docs]"
	@touch $@

$(MODELS): $(TEST)
	$(INSTALL) ".[models]"
	@touch $@

venv: $(TEST)

demo: $(DEMO)
	$(BIN)/python examples/digits_resnet.py

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(TEST)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(PYTEST) -m "not slow"

test-slow: $(TEST)
	$(PYTEST) --thorough -o faulthandler_timeout=3600 -m "slow or sampled or hypothesis"

coverage: $(TEST)
	$(PYTEST) -m "not slow" --cov --cov-report=term

$(OLDEST)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13) and "TensorFlow 2.16 needs Python 3.10 to 3.12; name one: make test-compat PYTHON=python3.12")'
	$(PYTHON) -m venv $(OLDEST)

$(NEWEST)/bin/python:
	$(PYTHON) -m venv $(NEWEST)

$(OLDEST)/.installed: setup.cfg pyproject.toml tests/oldest.txt | $(OLDEST)/bin/python
	PYTHONWARNINGS=ignore $(OLDEST)/bin/python -m pip install --quiet --constraint tests/oldest.txt --editable ".[test]"
	@touch $@

$(NEWEST)/.installed: setup.cfg pyproject.toml | $(NEWEST)/bin/python
	PYTHONWARNINGS=ignore $(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable ".[test]"
	@touch $@

test-compat: $(OLDEST)/.installed $(NEWEST)/.installed
	$(NEWEST)/bin/python tests/compat.py --workers $(WORKERS) $(OLDEST) $(NEWEST)

test-foreign: $(TEST)
	$(BIN)/python -m tests.foreign --workers $(WORKERS)

bench: $(TEST)
	$(BIN)/python -m benchmarks --only claims --again

docs: $(DOCS)
	$(BIN)/mkdocs build --quiet --strict
	@echo "open site/index.html"

bench-models: $(MODELS)
	$(BIN)/python -m benchmarks --only compatibility

bench-papers: $(TEST)
	$(BIN)/python -m benchmarks --only papers

bench-peers: $(TEST)
	$(BIN)/python -m benchmarks --only peers

bench-gpu: $(TEST)
	$(BIN)/python -m benchmarks --only gpu --again

clean:
	rm -rf $(VENV) .venv-compat build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .foreign examples/output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
