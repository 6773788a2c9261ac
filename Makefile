# Every target works alone on a machine with only make and Python 3.10 or newer: it creates the environment it needs.
# A stamp file remembers what was installed, so that nothing is installed twice until pyproject.toml or
# constraints.txt change.

PYTHON ?= python3
# In how many processes the tests run, a file in each at a time.
JOBS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test lint format bench
.DEFAULT_GOAL := help

help:
	@echo "make demo    train on a memory-mapped data set, save and reload (under a minute)"
	@echo "make test    run the tests;                choose with TESTS='-k index'"
	@echo "make lint    check format, style and types"
	@echo "make format  bring the code in format"
	@echo "make bench   measure against the reference; choose with BENCH='--families indexing'"

demo: .venv/installed
	.venv/bin/python examples/digits.py

# The tests of both directions of the disk formats need the reference beside us.
test: .venv/installed .venv-reference/installed
	.venv/bin/python -m pytest -n $(JOBS) --dist loadfile $(TESTS)

lint: .venv/installed
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy --strict src/

format: .venv/installed
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

bench: .venv/installed .venv-reference/installed
	.venv/bin/python benchmarks/run.py $(BENCH)

.venv/installed: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	touch $@

# The implementation that this one is measured against, never read: its public behaviour and speed only.
.venv-reference/installed: Makefile constraints.txt
	test -x .venv-reference/bin/python || $(PYTHON) -m venv .venv-reference
	.venv-reference/bin/python -m pip install --quiet tensordict==0.15.3 torch numpy h5py safetensors ray --constraint constraints.txt
	touch $@
