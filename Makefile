# make demo   train a small GPT with a folded pipeline on this machine and compare it with 1F1B
# make test   the whole test suite
# Both make their own virtual environment in .venv first.

PYTHON ?= python3
VENV := $(CURDIR)/.venv
INSTALLED := $(VENV)/.installed

# the environment's tools come first, also for the processes that the launcher starts; DeepSpeed builds its CPU op once, here
export PATH := $(VENV)/bin:$(PATH)
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.torch_extensions
export OMP_NUM_THREADS ?= 1

.PHONY: help venv demo test lint clean

help:
	@sed -n 's/^# //p' Makefile | head -3

venv: $(INSTALLED)

$(INSTALLED): setup.cfg constraints.txt pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt torch
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[test,plot,example]'
	touch $@

demo: $(INSTALLED)
	DS_ACCELERATOR=cpu python examples/demo.py

lint: $(INSTALLED)
	ruff check .

test: lint
	DS_ACCELERATOR=cpu python -m pytest -q

clean:
	rm -rf .venv .torch_extensions build *.egg-info .pytest_cache .ruff_cache
