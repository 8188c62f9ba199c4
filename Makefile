# Two commands do everything on a machine with Python 3.11 or 3.12: `make quickstart` and `make test`.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install quickstart cluster-programs test test-cluster test-faults lint format generate lock benchmarks clean

UV_VERSION := 0.13.9
LOCK := requirements/cpu.txt
VENV := .venv
BIN := $(VENV)/bin
RUNS := runs
LOCK_HASH := $(shell sha256sum $(LOCK) pyproject.toml | sha256sum | cut -c1-16)
STAMP := $(VENV)/installed-$(LOCK_HASH)

# The first interpreter that really is 3.11 or 3.12; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3.12 python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && { echo $$p; exit; }; done)

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

$(STAMP):
	@test -n "$(PYTHON)" || { echo "RLJob needs Python 3.11 or 3.12; none was found. Install one, or set PYTHON=/path/to/python3.12"; exit 1; }
	@echo "Installing into $(VENV) with $$($(PYTHON) --version) (about 6 GB, the first time some minutes) ..."
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --python $(VENV) --no-deps --compile-bytecode -r $(LOCK)
	$(BIN)/uv pip install --quiet --python $(VENV) --no-deps --no-build-isolation --editable .
	@touch $@

install: $(STAMP) ## Make the environment in .venv from the lock file

quickstart: $(STAMP) ## Train a small model with GRPO on this machine and draw its report
	@$(BIN)/rljob run examples/quickstart.yaml --output $(RUNS)/quickstart-$$(date +%Y%m%d-%H%M%S) $(QUICKSTART_ARGS)

cluster-programs: $(STAMP) ## Build etcd, Kubernetes, KubeRay, kwok and helm for the cluster tests, once (about 20 minutes)
	@$(BIN)/python tests/cluster/programs.py

test: $(STAMP) ## All tests, the fast ones first; those on a Kubernetes control plane need root and Go, and say so
	-@$(BIN)/python tests/cluster/programs.py
	@$(BIN)/python -m pytest $(TEST_ARGS)

test-cluster: $(STAMP) cluster-programs ## Only those on a Kubernetes control plane
	@$(BIN)/python -m pytest tests/cluster $(TEST_ARGS)

test-faults: $(STAMP) ## Every process killed in every phase; each run resumed and compared bit for bit
	@RLJOB_FAULTS=all $(BIN)/python -m pytest tests/worker/driver/test_kills.py $(TEST_ARGS)

lint: $(STAMP) ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP) ## Let ruff put the code into shape
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

generate: $(STAMP) ## Write the CRD, the chart's copy and docs/reference.md from the API types, the chart's README from its values
	@$(BIN)/python -m rljob_api.generate
	@$(BIN)/python helm/chart_readme.py
	@$(BIN)/python helm/dashboards.py

lock: $(STAMP) ## Resolve the lock files anew
	@$(BIN)/uv pip compile pyproject.toml --extra cpu --extra operator --extra dev --universal --python-version 3.11 \
		--override requirements/overrides.txt --generate-hashes --no-header --no-annotate --upgrade --quiet -o $(LOCK)
	@$(BIN)/uv pip compile pyproject.toml --extra operator --universal --python-version 3.11 --constraints $(LOCK) \
		--generate-hashes --no-header --no-annotate --upgrade --quiet -o requirements/operator.txt
	@printf 'trl==1.16.0\ntorch==2.11.0\ntransformers==5.23.0\n' | $(BIN)/uv pip compile - --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --upgrade --quiet -o requirements/peer-trl.txt

benchmarks: $(STAMP) ## Each prints a ratio against its limit or its peer (peer_trl makes an environment of its own)
	@for file in arena weight_sync rollout_vs_vllm train_vs_megatron peer_trl; do $(BIN)/python benchmarks/$$file.py; done

clean: ## Remove the environment and all runs
	rm -rf $(VENV) $(RUNS)
