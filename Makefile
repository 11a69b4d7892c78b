# Everything a fresh machine needs is Python 3.11 or newer, make, and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
INSTALLED = $(VENV)/installed-$(EXTRAS)-$(TORCH)
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu)
export BLOCKTRAIN_CACHE ?= $(CURDIR)/.cache
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install demo test browser fuzz check format clean bench-quality bench-speed bench-memory

install: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/blocktrain demo --out runs/demo

test: check browser
	$(BIN)/pytest -n 2 --dist worksteal

# For the chat page's test, which says so and is skipped where there is none and none can be had.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
		{ test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -qq -y chromium; } || \
		echo "no browser: the chat page is not tested"

# Thousands of generated requests, most of them malformed, instead of the few hundred of `test`.
fuzz: $(INSTALLED)
	BLOCKTRAIN_FUZZ_CASES=100 $(BIN)/pytest -n 2 -rP --timeout 900 -k no_request_breaks \
		tests/integration/test_coordinator_api.py
	BLOCKTRAIN_FUZZ_CASES=2000 $(BIN)/pytest --timeout 900 -k no_body_breaks \
		tests/integration/test_serve_api.py

check: $(INSTALLED)
	$(BIN)/ruff format --check src tests bench
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(INSTALLED)
	$(BIN)/ruff format src tests bench
	$(BIN)/ruff check --fix src tests bench

bench-quality: $(INSTALLED)
	$(BIN)/python bench/quality.py --config configs/demo.toml --out runs/bench-quality

bench-speed: $(INSTALLED)
	$(BIN)/python bench/speed.py --config configs/demo.toml --out runs/bench-speed

bench-memory: $(INSTALLED)
	$(BIN)/python bench/memory.py --config configs/demo.toml --out runs/bench-memory

# torch first and pinned: its build for CPUs is not on PyPI, but may be in an index that pip is set up for;
# PyPI's own brings gigabytes of CUDA packages, and is right only where there is an NVIDIA GPU.
CPU_BUILDS := --extra-index-url https://download.pytorch.org/whl/cpu
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("blocktrain needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(filter cuda,$(TORCH)),s/^\(torch==.*\)+cpu/\1/)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt torch $(if $(filter cpu,$(TORCH)),2>/dev/null || \
		$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt torch $(CPU_BUILDS))
	$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) .cache runs
