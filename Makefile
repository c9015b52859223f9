# `make demo` and `make test` each set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# bf16 products end in an illegal instruction on CPUs that advertise AMX without its tile palette.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: demo matrices study test test-full test-parallel test-hf hf-matrix lint docs package house web web-check conformance bench clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo         train residual, block_attnres and depth_attention side by side (about 4 minutes); writes a page under out/"
	@echo "make matrices     draw M of every mechanism under out/; updates docs/images/mixing_matrices.png"
	@echo "make study        compare six mechanisms with Muon and four with AdamW (about an hour and a half); writes docs/results/first_study*"
	@echo "make test         linters, types and all tests (a few minutes on two cores)"
	@echo "make test-full    the same with every combination of mechanism, KV site and form of the decoder, and 10,000 random command lines"
	@echo "make test-parallel  all tests of many processes: layouts, pipelines, checkpoints, killed ranks (about 12 minutes)"
	@echo "make test-hf      every family of Hugging Face models, with PEFT, Trainer and lm-eval, offline (a few minutes)"
	@echo "make hf-matrix    the same with the oldest and the newest transformers that depthmix.hf supports"
	@echo "make conformance  compare with public implementations from PyPI"
	@echo "make bench        measure speed and memory, also of other implementations; writes docs/results/speed.md (over an hour)"
	@echo "make web          build the page of report and explore from web/ (needs Node.js)"
	@echo "make web-check    build it again and compare it with the one in the package"
	@echo "make docs         build the documentation into site/"
	@echo "make package      build wheel and sdist into dist/, and test each in an empty environment (a few minutes)"
	@echo "make house        draw from the source which floor imports from which, into docs/house.md"
	@echo "make clean        remove everything that was built"

$(VENV)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "depthmix needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) -V). Set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "Python cannot create a virtual environment here; on Debian: apt-get install python3-venv"; exit 1; }
	touch $@

$(VENV)/dev: pyproject.toml constraints.txt | $(VENV)/pip
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# torch.compile needs a C++ compiler; without one the tests that use it are left out and named at the end.
.PHONY: compiler
compiler:
	@command -v c++ >/dev/null || command -v g++ >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq g++; } || \
	  echo "no C++ compiler found and none could be installed: tests of compiled code will be left out"

# The pages of `report` and `explore` are tested in Chromium, with axe-core for accessibility; without them those tests
# are left out and named at the end.
.PHONY: browser
browser: tests/browser/node_modules/installed
	@command -v chromium >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium; } || \
	  echo "no chromium found and none could be installed: tests of pages will be left out"

tests/browser/node_modules/installed: tests/browser/package-lock.json
	@command -v npm >/dev/null && npm ci --prefix tests/browser --ignore-scripts --silent && touch $@ || \
	  echo "axe-core could not be installed by npm: the tests of accessibility will be left out"

# The code of the pages: users need no Node, since the built page is part of the package.
web/node_modules/installed: web/package-lock.json
	@command -v npm >/dev/null || { echo "npm is needed to build the page: install Node.js 20 or newer"; exit 1; }
	npm ci --prefix web --ignore-scripts --silent
	touch $@

web: web/node_modules/installed
	npm --prefix web run --silent check
	npm --prefix web test --silent
	npm --prefix web run --silent build

web-check: $(VENV)/dev web/node_modules/installed
	$(BIN)/python -m tools.web_sources --check

demo: $(VENV)/dev
	$(BIN)/python examples/compare_demo.py out/demo $(ARGS)

matrices: $(VENV)/dev
	$(BIN)/python examples/mixing_matrices.py out/mixing_matrices
	cp out/mixing_matrices/all.png docs/images/mixing_matrices.png

# Started again it resumes; ARGS="--seeds 1" for a part of it, whose runs the whole then uses. What a mechanism gains
# depends on the optimiser, so both are compared, each at the best of its own rates. STUDIES is where the runs are kept.
STUDIES ?= studies
study: $(VENV)/dev
	$(BIN)/depthmix compare --mixers residual denseformer mhc block_attnres attnres depth_attention $(STUDY) \
	  --seeds 5 --lrs 5e-3 1e-2 2e-2 4e-2 --folder $(STUDIES)/first --publish docs/results/first_study $(ARGS)
	$(BIN)/depthmix compare --mixers residual block_attnres attnres depth_attention $(STUDY) --set optimizer.name=adamw \
	  --seeds 3 --lrs 1.25e-3 2.5e-3 5e-3 1e-2 --folder $(STUDIES)/first_adamw --publish docs/results/first_study_adamw $(ARGS)

STUDY := --depth 24 --dim 96 --tokens 614400 --lr-share 0.333 --jobs 2 \
  --set run.validate_every=30 --set run.snapshot_every=50 --set mixer.num_blocks=8

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/dev compiler browser lint
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-full: $(VENV)/dev compiler browser lint
	$(BIN)/python -m pytest -n 2 -m "" $(ARGS)

test-parallel: $(VENV)/dev compiler
	$(BIN)/python -m pytest -m "" tests/parallel $(ARGS)

# Hugging Face's packages for training and evaluation have an environment of their own. HF_VERSION is any requirement
# on transformers that pip understands.
HF := .venv-hf
HF_VERSION := >=5.8.1,<6
$(HF)/installed: pyproject.toml constraints.txt
	@$(MAKE) -s VENV=$(HF) $(HF)/pip
	$(HF)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev-hf]' 'transformers$(HF_VERSION)'
	touch $@

test-hf: $(HF)/installed compiler
	HF_HUB_OFFLINE=1 $(HF)/bin/python -m pytest -n 2 -m "" tests/hf $(ARGS)

hf-matrix:
	$(MAKE) test-hf HF=.venv-hf-oldest HF_VERSION===5.8.1
	$(MAKE) test-hf

# Public implementations bring many packages along: they have an environment of their own.
PEERS := .venv-conformance
$(PEERS)/installed: pyproject.toml constraints.txt
	@$(MAKE) -s VENV=$(PEERS) $(PEERS)/pip
	$(PEERS)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[conformance]'
	touch $@

conformance: $(PEERS)/installed
	$(PEERS)/bin/python -m pytest --confcutdir=tests/conformance tests/conformance $(ARGS) || { \
	  [ $$? = 5 ] && echo "nothing was compared: no test was collected; is every implementation importable?"; exit 1; }

# The whole page of results from one run; ARGS="--quick" for a trial.
BENCH := .venv-bench
$(BENCH)/installed: pyproject.toml constraints.txt
	@$(MAKE) -s VENV=$(BENCH) $(BENCH)/pip
	$(BENCH)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

bench: $(BENCH)/installed compiler
	$(BENCH)/bin/depthmix bench --compiled --output docs/results/speed.json --figures docs/images/speed \
	  --markdown docs/results/speed.md $(ARGS)

house: $(VENV)/dev
	$(BIN)/python -m tools.draw_house

# The theme's notice about a later mkdocs does not concern a build with mkdocs 1.
docs: $(VENV)/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m tools.site_requests site

package: $(VENV)/dev
	$(BIN)/python -m tools.package

clean:
	rm -rf web/node_modules tests/browser/node_modules
	rm -rf $(VENV) .venv-conformance .venv-bench .venv-hf .venv-hf-oldest build dist site out .pytest_cache .mypy_cache .ruff_cache .hypothesis
