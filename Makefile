# Every target creates its environment in .venv; nothing else is installed or changed.
#
#   make demo                     train a small GPT, kill a rank, compare the weights bit by bit
#   make test                     lint, types, import contracts and the tests that fit into a quarter of an hour
#   make test-thorough            the others that CI runs, too: 20 minutes
#   make PYTHON=python3.12 test   with another interpreter (3.11 or later)
#   make TORCH_INDEX=https://download.pytorch.org/whl/cpu demo
#                                 with torch's small CPU build; by default pip fetches the CUDA build on Linux
#   make search MINUTES=30        train random loops under random faults; SEED=n repeats a failure
#   make test-long LONG=tests/worker/groups/test_torch_suite.py
#                                 the long tests of some files only
#   make JOBS=0 test              run the tests one after the other, for a debugger or a very slow machine
#   make TORCH=2.15.0 test-torch  test with another torch, in its own environment: pip fetches several gigabytes

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
TORCH_INDEX ?=
CUDA_TORCH ?= 2.15.0
TORCH_VERSIONS ?= 2.13.0 2.14.1 2.15.0
BENCH ?=
JOBS ?= 2
MINUTES ?= 10
SEED ?=
LONG ?= tests

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FRAMEWORKS := $(VENV)/.frameworks
SITE := $(VENV)/.site
# The pinned versions; TORCH replaces torch's.
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
TORCH_FILES := .torch-files
SOURCES := deadpool_run tests recipes

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test suite test-thorough test-torch test-device test-cuda-wheel test-gpu test-torch-api lint format test-long frameworks test-frameworks matrix search test-slurm bench dist docs-tools docs clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\): .*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

# torch is installed first and pinned, because the package alone would make pip take the newest one. compileall does for an
# editable installation what pip does for a plain one: a launch should not start with compiling.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "deadpool-run needs Python 3.11 or later, and '$(PYTHON)' is older or missing: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "'$(PYTHON) -m venv' failed: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS))
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[dev]'
	$(BIN)/python -m compileall -q deadpool_run
	@touch $@

demo: $(STAMP)  ## train a small GPT, kill a rank, compare the weights bit by bit
	$(BIN)/python recipes/gpt/demo.py

test: lint suite  ## lint, types, import contracts and tests

suite: $(STAMP)
	$(BIN)/python -m pytest -m 'not thorough and not slow and not slurm and not frameworks' -n $(JOBS) --dist loadgroup

test-thorough: $(STAMP)  ## run the tests that `make test` leaves out to be short, and that CI runs
	$(BIN)/python -m pytest -m 'thorough and not slow and not slurm and not frameworks' -n $(JOBS) --dist loadgroup

test-torch:  ## run the tests with another torch: make TORCH=2.15.0 test-torch
	@test -n '$(TORCH)' || { echo "name a version: make TORCH=2.15.0 test-torch" >&2; exit 1; }
	$(MAKE) VENV=.venv-torch-$(TORCH) suite test-thorough

test-device: $(STAMP)  ## loops and the ladder on a fake GPU, and planted defects: writes docs/gpu.md
	$(BIN)/python -m pytest tests/process/test_fake_device.py tests/process/test_ladder.py tests/worker/device \
	  -m 'slow or not slow' -n $(JOBS) --dist worksteal --on-device docs/gpu.md

test-cuda-wheel:  ## check NCCL's classes and options in torch's CUDA build; needs no GPU, fetches several gigabytes
	$(MAKE) VENV=.venv-torch-$(CUDA_TORCH) TORCH=$(CUDA_TORCH) TORCH_INDEX= .venv-torch-$(CUDA_TORCH)/.installed
	.venv-torch-$(CUDA_TORCH)/bin/python -c 'import sys, torch.distributed as dist; sys.exit(not dist.is_nccl_available())' || \
	  { echo "pip fetched a torch without NCCL: set its index to one that has the CUDA build" >&2; exit 1; }
	.venv-torch-$(CUDA_TORCH)/bin/python -m pytest tests/worker/device/test_nccl.py

test-gpu:  ## run the tests that need GPUs (most need two), with torch's CUDA build: fetches several gigabytes
	$(MAKE) VENV=.venv-torch-$(CUDA_TORCH) TORCH=$(CUDA_TORCH) TORCH_INDEX= .venv-torch-$(CUDA_TORCH)/.installed
	.venv-torch-$(CUDA_TORCH)/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo "torch finds no GPU: nvidia-smi shows whether the driver does" >&2; exit 1; }
	.venv-torch-$(CUDA_TORCH)/bin/python -m pytest -m gpu tests/gpu tests/worker/device

test-torch-api: $(STAMP)  ## look up the private names that we use in every supported torch
	for each in $(TORCH_VERSIONS); do test -d $(TORCH_FILES)/$$each || { \
	  $(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --platform macosx_14_0_arm64 \
	    -d $(TORCH_FILES)/wheels torch==$$each && \
	  $(BIN)/python tests/worker/torch_files.py $(TORCH_FILES)/wheels/torch-$$each-*.whl; } || exit 1; done
	rm -rf $(TORCH_FILES)/wheels
	$(BIN)/python -m pytest tests/worker/compat/test_torch_names.py

test-long: $(STAMP)  ## run the long tests that `make test` skips
	$(BIN)/python -m pytest -m 'slow and not slurm and not frameworks' -n $(JOBS) --dist loadgroup $(LONG)

$(FRAMEWORKS): $(STAMP)
	$(BIN)/python -m pip install --quiet --retries 1 -c $(CONSTRAINTS) -e '.[dev,huggingface,lightning]'
	@touch $@

frameworks: $(FRAMEWORKS)

test-frameworks: $(FRAMEWORKS)  ## install Hugging Face and Lightning, and test their recipes
	$(BIN)/python -m pytest -m frameworks -n $(JOBS)

matrix: $(STAMP)  ## kill a rank in each phase of each training loop: writes docs/compatibility.md
	$(BIN)/python -m pytest tests/loops tests/contract -m 'slow or not slow' -n $(JOBS) --dist worksteal \
	  --matrix docs/compatibility.md --contract docs/compatibility.md

search: $(STAMP)  ## random loops, layouts and faults for MINUTES=10; SEED=n repeats a failure
	failed=0; \
	$(if $(SEED),,$(BIN)/python tests/sim/shells/search_shells.py --minutes $(MINUTES)e-1 || failed=1; \
	  $(BIN)/python tests/core/leadership/search_elections.py --minutes $(MINUTES)e-1 || failed=1; \
	  $(BIN)/python -m pytest -q --hypothesis-profile long --timeout 1800 -n $(JOBS) $$(find tests -name 'test_*_fuzz.py') || failed=1;) \
	$(BIN)/python tests/search/search.py --at-once $(JOBS) $(if $(SEED),--seed $(SEED),--minutes $(MINUTES)) || failed=1; \
	exit $$failed

test-slurm: $(STAMP)  ## test on a real Slurm with simulated nodes; installs slurm-wlm if it may
	tests/slurm/install.sh
	$(BIN)/python -m pytest tests/slurm

lint: $(STAMP)  ## ruff, mypy and the import contracts
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## format the sources and fix lint errors
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(STAMP)  ## measure start-up, overhead, recovery and leaks on this machine (BENCH=--quick: minutes)
	set -e; for each in startup overhead recovery soak; do $(BIN)/python tests/bench/$$each.py $(BENCH); done

dist: $(STAMP)  ## build the sdist and the wheel into dist/, and test them in an environment of their own
	TORCH_INDEX='$(TORCH_INDEX)' $(BIN)/python -m pytest -m slow -n 0 tests/packaging --artefacts dist

$(SITE): $(STAMP)
	$(BIN)/python -m pip install --quiet --retries 1 -c $(CONSTRAINTS) -e '.[dev,docs]'
	@touch $@

docs-tools: $(SITE)

docs: $(SITE)  ## build the documentation as a site into build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict -f .mkdocs.yml
	@echo 'open build/site/index.html, or run $(BIN)/mkdocs serve -f .mkdocs.yml'

clean:  ## remove the environment and every build output
	rm -rf $(VENV) .venv-torch-* $(TORCH_FILES) build dist .search .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
