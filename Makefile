# Two commands do everything on a machine with Python 3.11 or 3.12: `make quickstart` and `make test`.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: ascend-wheels chart docs release help install quickstart tracker-packages peft-packages cluster-programs cluster-up cluster-down demo-cluster test test-cluster test-faults test-mutants test-next image-operator image-worker-cpu image-worker-ascend image-worker-cuda lint format generate lock benchmarks clean

UV_VERSION := 0.13.9
LOCK := requirements/cpu.txt
VENV := .venv
BIN := $(VENV)/bin
RUNS := runs
LOCK_HASH := $(shell sha256sum $(LOCK) pyproject.toml | sha256sum | cut -c1-16)
STAMP := $(VENV)/installed-$(LOCK_HASH)
TRACKERS_STAMP := $(VENV)/trackers/installed
PEFT_STAMP := $(VENV)/peft/installed
DOCS_STAMP := $(VENV)/docs/installed
NEXT_STAMP := $(VENV)/next/installed

# The first interpreter that really is 3.11 or 3.12; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3.12 python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && { echo $$p; exit; }; done)

# `make test-next` alone is run on Python 3.13, where there is one.
NEXT_PYTHON ?= $(shell python3.13 -c 'import sys; print(sys.executable)' 2>/dev/null || echo $(BIN)/python)

# A worker image's lock file has what its base lacks: what the base holds (requirements/worker-*-base.txt) bounds the versions and
# is not written down. The versions of the CPU worker, which is what is tested, are taken where the base allows them.
define lock_over_base
cp requirements/worker-cpu.txt requirements/worker-$(1).txt; \
$(BIN)/uv pip compile pyproject.toml --extra $(2) --universal --python-version 3.12 --excludes <(echo torch) \
	--constraints requirements/worker-$(1)-base.txt \
	$$(sed -nE 's/^([A-Za-z0-9._-]+)==.*/--no-emit-package \1/p' requirements/worker-$(1)-base.txt) \
	--generate-hashes --no-header --no-annotate --quiet -o requirements/worker-$(1).txt
endef

# What an image holds is asked of the image itself, and lies beside it: dist/rljob-NAME-0.1.0.cdx.json.
define image
docker build -f images/$(1)/Dockerfile -t rljob-$(1):0.1.0 $(IMAGE_ARGS) .
@mkdir -p dist
docker run --rm -i --network none --entrypoint /opt/rljob/bin/python rljob-$(1):0.1.0 - rljob-$(1):0.1.0 \
	< images/sbom.py > dist/rljob-$(1)-0.1.0.cdx.json
endef

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-20s %s\n", $$1, $$2}'

$(STAMP):
	@test -n "$(PYTHON)" || { echo "RLJob needs Python 3.11 or 3.12; none was found. Install one, or set PYTHON=/path/to/python3.12"; exit 1; }
	@echo "Installing into $(VENV) with $$($(PYTHON) --version) (about 7 GB, the first time some minutes) ..."
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --python $(VENV) --no-deps --compile-bytecode -r $(LOCK)
	$(BIN)/uv pip install --quiet --python $(VENV) --no-deps --no-build-isolation --editable .
	@touch $@

install: $(STAMP) ## Make the environment in .venv from the lock file

quickstart: $(STAMP) ## Train a small model with GRPO on this machine and draw its report
	@$(BIN)/rljob run examples/quickstart.yaml --output $(RUNS)/quickstart-$$(date +%Y%m%d-%H%M%S) $(QUICKSTART_ARGS)

cluster-programs: $(STAMP) ## Build etcd, Kubernetes, KubeRay, Kueue, CoreDNS, kwok and helm for the cluster tests, once (about 30 minutes)
	@$(BIN)/python tests/cluster/programs.py

cluster-up: $(STAMP) ## A Kubernetes cluster of one real node on this machine, with RLJob and Prometheus (root, Go)
	@$(BIN)/python tests/cluster/local_cluster.py up

cluster-down: $(STAMP) ## End it
	@$(BIN)/python tests/cluster/local_cluster.py down

demo-cluster: $(STAMP) ## Bring it up, apply the quickstart there and follow it to its end
	@$(BIN)/python tests/cluster/local_cluster.py demo

# Their pins are not those of vLLM and Megatron: the packages of the trackers have an environment of their own here.
$(TRACKERS_STAMP): $(STAMP) requirements/trackers.txt
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)/trackers
	$(BIN)/uv pip install --quiet --python $(VENV)/trackers/bin/python --no-deps -r requirements/trackers.txt
	@touch $@

tracker-packages: $(TRACKERS_STAMP) ## The packages of all experiment trackers, in .venv/trackers, where RLJob finds them

# Tests alone load adapters with it. What it needs beside accelerate is in the lock file.
$(PEFT_STAMP): $(STAMP) requirements/peft.txt
	@rm -rf $(VENV)/peft
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(VENV)/peft -r requirements/peft.txt
	@touch $@

peft-packages: $(PEFT_STAMP) ## PEFT, which tests load exported adapters with, in .venv/peft

test: $(STAMP) $(TRACKERS_STAMP) $(PEFT_STAMP) ## All tests, in three processes side by side; those on a Kubernetes control plane need root and Go, and say so
	@$(BIN)/python -m pytest --numprocesses 3 $(TEST_ARGS)

test-cluster: $(STAMP) cluster-programs ## Only those on a Kubernetes control plane
	@$(BIN)/python -m pytest tests/cluster $(TEST_ARGS)

test-faults: $(STAMP) $(TRACKERS_STAMP) $(PEFT_STAMP) cluster-programs ## Every process killed in every phase, every write refused, generations interrupted, every fault on a real node; compared bit for bit
	@RLJOB_FAULTS=all $(BIN)/python -m pytest $$(grep -rlE --include="test_*.py" "^from support.samples import .*(ALL|drawn|unless_)" tests) $(TEST_ARGS)

test-mutants: $(STAMP) ## Faults made by hand in a copy of the code: which of them do the tests notice?
	@cd tests && $(abspath $(BIN))/python -m mutants.run $(MUTANTS)

# Versions that RLJob is to move to have an environment of their own; no test of `make test` sees it.
$(NEXT_STAMP): $(STAMP) requirements/cpu-next.txt
	$(BIN)/uv venv --quiet --clear --python $(NEXT_PYTHON) $(VENV)/next
	$(BIN)/uv pip install --quiet --python $(VENV)/next/bin/python --no-deps -r requirements/cpu-next.txt
	@touch $@

test-next: $(NEXT_STAMP) ## The worker's tests on the versions of requirements/cpu-next.txt, and a table of what breaks (NEXT_ARGS="TESTS")
	@PYTHONPATH=tests $(BIN)/python -m next_versions.run --python $(VENV)/next/bin/python $(NEXT_ARGS)

chart: $(STAMP) ## Package the chart in dist/: an archive, and an OCI image layout (CHART_ARGS="--home URL --source URL --icon URL")
	@$(BIN)/python helm/package.py --helm "$$(command -v helm || $(BIN)/python tests/cluster/programs.py helm | tail -1)" $(CHART_ARGS)

release: $(STAMP) ## All files of a release in dist/release: wheel, source, lock files, chart, SBOMs, notes, checksums (nothing is published)
	@$(BIN)/python release/release.py --helm "$$(command -v helm || $(BIN)/python tests/cluster/programs.py helm | tail -1)" $(RELEASE_ARGS)

ascend-wheels: ## Make the memory saver's and MindSpeed's wheels for image-worker-ascend from their repositories (in a container of its base)
	@bash images/worker-ascend/make_wheels.sh

image-operator: ## Build the operator's image and its SBOM (docker)
	$(call image,operator)

image-worker-cpu: ## Build the worker's image for CPU devices and its SBOM (docker)
	$(call image,worker-cpu)

image-worker-ascend: ## Build the worker's image for NPUs and its SBOM (docker; A3: IMAGE_ARGS="--build-arg BASE_IMAGE=...-a3")
	$(call image,worker-ascend)

image-worker-cuda: ## Build the worker's image for GPUs and its SBOM (docker)
	$(call image,worker-cuda)

# The site's generator has an environment of its own: it takes no part in anything else.
$(DOCS_STAMP): $(STAMP) requirements/docs.txt
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)/docs
	$(BIN)/uv pip install --quiet --python $(VENV)/docs/bin/python --no-deps -r requirements/docs.txt
	@touch $@

docs: $(DOCS_STAMP) ## The documentation as a site in dist/site, built strictly: no dead link, no dead anchor
	@$(VENV)/docs/bin/python docs/site_build.py
	@echo "dist/site/index.html; for its search, which a browser refuses to a file: $(BIN)/python -m http.server --bind 127.0.0.1 --directory dist/site"

lint: $(STAMP) $(DOCS_STAMP) ## ruff, mypy, import contracts, hadolint, the counts that may not grow, Chinese pages older than the English ones, the site of the documentation
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy benchmarks
	@PYTHONPATH=tests $(BIN)/lint-imports --no-cache
	@$(BIN)/hadolint --no-color images/*/Dockerfile
	@$(BIN)/python tests/support/counts.py
	@$(BIN)/python tests/support/translations.py
	@$(BIN)/python -m rljob_api.reference_zh
	@$(VENV)/docs/bin/python docs/site_build.py

format: $(STAMP) ## Let ruff put the code into shape
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

generate: $(STAMP) ## Write the CRD, the chart's copy, docs/reference.md, docs/licences.md and the chart's README from what they follow
	@$(BIN)/python -m rljob_worker.generate
	@$(BIN)/python -m rljob_api.generate
	@PYTHONPATH=tests $(BIN)/python tests/support/pod_fields.py
	@$(BIN)/python helm/chart_readme.py
	@$(BIN)/python helm/dashboards.py
	@$(BIN)/python images/sbom.py --licences > docs/licences.md.new && mv docs/licences.md.new docs/licences.md

lock: $(STAMP) ## Resolve the lock files anew
	@$(BIN)/uv pip compile pyproject.toml --extra cpu --extra operator --extra dev --universal --python-version 3.11 \
		--override requirements/overrides.txt --generate-hashes --no-header --no-annotate --upgrade --quiet -o $(LOCK)
	@$(BIN)/uv pip compile pyproject.toml --extra operator --universal --python-version 3.11 --constraints $(LOCK) \
		--generate-hashes --no-header --no-annotate --upgrade --quiet -o requirements/operator.txt
	@$(BIN)/uv pip compile pyproject.toml --extra cpu --universal --python-version 3.11 --constraints $(LOCK) \
		--override requirements/overrides.txt --generate-hashes --no-header --no-annotate --upgrade --quiet \
		-o requirements/worker-cpu.txt
	@$(BIN)/uv pip compile pyproject.toml --no-config --extra cpu --extra operator --extra dev --universal --python-version 3.11 \
		--override requirements/next-overrides.txt --generate-hashes --no-header --no-annotate --upgrade --quiet \
		-o requirements/cpu-next.txt
	@$(BIN)/uv pip compile pyproject.toml --extra wandb --extra mlflow --extra clearml --extra swanlab --extra trackio \
		--universal --python-version 3.11 --generate-hashes --no-header --no-annotate --upgrade --quiet -o requirements/trackers.txt
	@printf 'mkdocs-material\n' | $(BIN)/uv pip compile - --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --upgrade --quiet -o requirements/docs.txt
	@printf 'peft\naccelerate\n' | $(BIN)/uv pip compile - --no-deps --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --upgrade --quiet -o requirements/peft.txt
	@printf 'hatchling\n' | $(BIN)/uv pip compile - --universal --python-version 3.11 --constraints $(LOCK) \
		--generate-hashes --no-header --no-annotate --quiet -o requirements/build.txt
	@$(call lock_over_base,ascend,worker)
	@$(call lock_over_base,cuda,cuda)
	@printf 'trl==1.16.0\ntorch==2.11.0\ntransformers==5.23.0\n' | $(BIN)/uv pip compile - --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --upgrade --quiet -o requirements/peer-trl.txt

benchmarks: $(STAMP) ## Every row of the README's table; names at the end those that missed (peer_trl makes an environment of its own)
	@$(BIN)/python benchmarks/all.py

clean: ## Remove the environment and all runs
	rm -rf $(VENV) $(RUNS)
