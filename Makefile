# `make demo` and `make test` set up all they need; everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AUDIT := .cache/audit

.PHONY: setup demo test test-all check audit mutants clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/draftsmith demo

test: setup
	$(BIN)/pytest --quiet

test-all: setup
	$(BIN)/pytest --quiet -m ''

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Known vulnerabilities and licences of everything in .venv. Asks pypi.org, so it is no part of CI; a package that nobody
# can be asked about fails it.
audit: setup
	test -x $(AUDIT)/bin/pip-audit || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check 'pip-audit>=2.9' 'pip-licenses>=5'
	$(AUDIT)/bin/pip-licenses --python $(BIN)/python --format markdown --order license > $(AUDIT)/licences.md
	cat $(AUDIT)/licences.md
	$(BIN)/python -m pip freeze --exclude-editable > $(AUDIT)/frozen.txt
	sed 's/+.*//' $(AUDIT)/frozen.txt > $(AUDIT)/installed.txt  # torch 2.13.0+cpu is 2.13.0 there
	$(AUDIT)/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off --requirement $(AUDIT)/installed.txt

# Minutes, not in CI: branch coverage and a mutation run of what must not be wrong (docs/testing.md).
mutants: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[mutants]'
	$(BIN)/python scripts/mutants.py

clean:
	rm -rf $(VENV) .cache .hypothesis mutants .pytest_cache .mypy_cache .ruff_cache
