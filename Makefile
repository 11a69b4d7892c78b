# Everything a fresh machine needs is Python 3.11 or newer, make, and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu)
# One virtual environment, with a stamp file for each set of extras that was installed into it: `dev` has
# the test tools, `none` is what users need. The demo and the benches run with any of them.
EXTRAS ?= dev
DEV := $(VENV)/installed-dev-$(TORCH)
ANY := $(firstword $(wildcard $(VENV)/installed-*-$(TORCH)) $(VENV)/installed-none-$(TORCH))
export BLOCKTRAIN_CACHE ?= $(CURDIR)/.cache
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install demo demo-long docs test browser llama-cpp lm-eval fuzz check format reference clean bench-quality bench-speed bench-memory

install: $(VENV)/installed-$(EXTRAS)-$(TORCH)

demo: $(ANY)
	$(BIN)/blocktrain demo --out runs/demo

# About half an hour on two cores. Opens the run page and, at the end, the chat page. Stop it at any time;
# the same command continues.
demo-long: $(ANY)
	$(BIN)/blocktrain demo --config demo-long --blocks-only --open --out runs/demo-long

# The site of the documentation in build/site. Links that lead nowhere are errors.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test: check browser
	$(BIN)/pytest -n 2 --dist worksteal

# The test of the chat page needs a browser and is skipped without one. Only with CI=true in the
# environment, which CI sets, and as root does this install Chromium.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
		{ test "$$CI" = true && test "$$(id -u)" = 0 && \
			apt-get update -qq && apt-get install -qq -y chromium; } || \
		echo "no browser, so the chat page is not tested: install chromium (Debian: apt-get install chromium)"

# llama.cpp reads exported models. Building it takes about five minutes and needs cmake and a C++ compiler.
llama-cpp: $(DEV)
	$(BIN)/pip install llama-cpp-python
	$(BIN)/pytest -m llama_cpp tests/unit/interop

# lm-evaluation-harness asks a server. It brings about 35 packages.
lm-eval: $(DEV)
	$(BIN)/pip install --constraint $(VENV)/constraints.txt 'lm-eval[api]'
	$(BIN)/pytest tests/integration/test_serve_tokens.py

# Thousands of generated requests, most of them malformed, instead of the few hundred of `test`.
fuzz: $(DEV)
	BLOCKTRAIN_FUZZ_CASES=100 $(BIN)/pytest -n 2 -rP --timeout 900 -k no_request_breaks \
		tests/integration/test_coordinator_api.py
	BLOCKTRAIN_FUZZ_CASES=2000 $(BIN)/pytest --timeout 900 -k no_body_breaks \
		tests/integration/test_serve_api.py

check: $(DEV)
	$(BIN)/ruff format --check src tests bench scripts
	$(BIN)/ruff check src tests bench scripts
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	find src -name '*.py' -exec awk 'FNR == 501 { print FILENAME " has over 500 lines"; n++ } END { exit n }' {} +

format: $(DEV)
	$(BIN)/ruff format src tests bench scripts
	$(BIN)/ruff check --fix src tests bench scripts

# docs/REFERENCE.md, from the code; a test fails while it is out of date.
reference: $(DEV)
	$(BIN)/python scripts/reference.py

bench-quality: $(ANY)
	$(BIN)/python bench/quality.py --config configs/demo.toml --out runs/bench-quality

bench-speed: $(ANY)
	$(BIN)/python bench/speed.py --config configs/demo.toml --out runs/bench-speed

bench-memory: $(ANY)
	$(BIN)/python bench/memory.py --config configs/demo.toml --out runs/bench-memory

# torch first and pinned: its build for CPUs is not on PyPI, but may be in an index that pip is set up for;
# PyPI's own brings gigabytes of CUDA packages, and is right only where there is an NVIDIA GPU.
CPU_BUILDS := --extra-index-url https://download.pytorch.org/whl/cpu
$(VENV)/installed-%-$(TORCH): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("blocktrain needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(filter cuda,$(TORCH)),s/^\(torch==.*\)+cpu/\1/)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt torch $(if $(filter cpu,$(TORCH)),2>/dev/null || \
		$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt torch $(CPU_BUILDS))
	$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt --editable '.$(if $(filter none,$*),,[$*])'
	touch $@

clean:
	rm -rf $(VENV) .cache runs
