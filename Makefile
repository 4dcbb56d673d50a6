# Two commands matter: `make demo` trains a model, `make test` runs every test that needs no GPU.
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help setup demo test test-slow test-gpu test-compose check format protos bench clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile

setup: ## create or refresh the virtual environment
	@scripts/setup.sh $(VENV)

demo: setup ## train the arithmetic preset with PPO through all services
	@$(BIN)/shoal demo $(ARGS)

test: setup ## every test that needs no GPU and is not slow
	$(PYTEST) $(ARGS)

test-slow: setup ## minutes-long tests
	$(PYTEST) -m 'slow and not gpu and not compose' $(ARGS)

test-gpu: setup ## tests that need an NVIDIA GPU
	$(PYTEST) -m gpu tests/gpu $(ARGS)

test-compose: setup ## builds and runs the containers
	$(PYTEST) -m compose tests/e2e $(ARGS)

check: setup ## ruff, mypy, import rules, proto lint, stub diff
	@VENV=$(VENV) scripts/check.sh

format: setup ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

protos: setup ## regenerate the committed gRPC stubs
	VENV=$(VENV) scripts/gen_protos.sh

bench: setup ## seconds per PPO step (see docs/performance.md)
	$(BIN)/shoal bench step $(ARGS)

clean: ## remove run folders and caches
	rm -rf runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
