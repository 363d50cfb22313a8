# make conform   judge moe_fast by the gate, on the GPU when there is one, else in Triton's CPU interpreter
# make test      run the project's own tests
# make lint      ruff, mypy and the import laws
# make docs      build the documentation site into site/; a broken link is an error
# make oracles   compare the reference with other people's code, installed or read: docs/second-opinions.md
# make rediscover   judge releases with known defects, and the releases that mended them: docs/second-opinions.md
# make bench     cost of the harness per case; on a GPU also the speed of moe_fast

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
IMPL   ?= moe_fast

.PHONY: conform test lint style types laws docs oracles rediscover bench setup
.DEFAULT_GOAL := conform

setup: $(VENV)/.ready

# Where there is an NVIDIA GPU, the torch that is installed for it stays; elsewhere a CPU build is enough.
$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then \
		$(PYTHON) -m venv --system-site-packages $(VENV) && \
		$(BIN)/python -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || $(BIN)/pip install -q 'torch>=2.11'; \
	else \
		$(PYTHON) -m venv $(VENV) && $(BIN)/pip install -q torch==2.13.0; \
	fi
	$(BIN)/pip install -q -e '.[fast,xdist,mutants,vectors,docs,cluster,dev]'
	$(BIN)/pip install -q --no-deps 'megatron-core==0.16.1' || echo 'megatron-core cannot be installed here: it is not judged'
	$(BIN)/pip install -q torchao==0.18.0 transformers==5.24.0 || echo 'torchao and transformers cannot be installed here: they are not judged'
	$(BIN)/pip install -q tyro spmd_types==0.2.3 && $(BIN)/pip install -q --no-deps torchtitan==0.3.0 || echo 'torchtitan cannot be installed here: its experts are not replaced'
	touch $@

conform: setup
	$(BIN)/moe-conformance run --impl $(IMPL) --profile gate

# each child of a test imports the packages, so their bytecode is kept; a third worker runs while tests wait for children
test: export PYTHONDONTWRITEBYTECODE =
test: lint
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations 25 tests

lint: setup
	@$(MAKE) --no-print-directory -j 2 style types laws

style:
	$(BIN)/ruff check . && $(BIN)/ruff format --check -q .

types:
	$(BIN)/mypy

laws:
	$(BIN)/lint-imports

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

oracles: setup
	$(BIN)/python -m evidence.oracles
	$(BIN)/python -m pytest evidence/megatron_claims

rediscover: setup
	$(BIN)/python -m evidence.rediscovery

bench: setup
	$(BIN)/python -m conformance bench
