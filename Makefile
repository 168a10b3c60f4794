# make demo   train a small GPT with a folded pipeline on this machine and compare it with 1F1B
# make test   the whole test suite
# make soak   1,000 random schedules on random models proved, 150 of them run and compared with one process; about 6 minutes
# make bench  DeepSpeed, torch and ds_fold side by side on an emulated slow network (needs root), and on this machine's processors
# make compat the core tests under the newest release of each of four minor versions of DeepSpeed; downloads them, about 8 minutes
# make docs   the documentation as a web site, in build/site
# All make their own virtual environment in .venv first.

PYTHON ?= python3
VENV := $(CURDIR)/.venv
INSTALLED := $(VENV)/.installed

# the environment's tools come first, also for the processes that the launcher starts; DeepSpeed builds its CPU op once, here
export PATH := $(VENV)/bin:$(PATH)
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.torch_extensions
export OMP_NUM_THREADS ?= 1

.PHONY: help venv demo test soak bench docs compat lint clean

help:
	@sed -n 's/^# //p' Makefile | head -7

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

soak: $(INSTALLED)
	DS_ACCELERATOR=cpu python tests/soak.py

bench: $(INSTALLED)
	python benchmarks/compare.py
	DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 benchmarks/real_compute.py

docs: $(INSTALLED)
	python -m pip install -q -c constraints.txt -e '.[docs]'
	DS_ACCELERATOR=cpu python -m mkdocs build --strict

compat: $(INSTALLED)
	python tests/releases.py

clean:
	rm -rf .venv .compat .torch_extensions build *.egg-info .pytest_cache .ruff_cache
