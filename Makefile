# `make serve` and `make test` work from nothing. VENV=/path uses an environment of yours and installs nothing into it.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 30000
BIN := $(VENV)/bin

.PHONY: serve test lint install clean

serve: install
	$(BIN)/laprox-sglang demo --port $(PORT) $(if $(SERVE_ONCE),--once) $(SERVE_FLAGS)

test: install
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ifeq ($(VENV),.venv)
STAMP := $(VENV)/.installed

install: $(STAMP)

# About 11 GB and a few minutes the first time: SGLang brings PyTorch for CUDA, also where there is no GPU.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)
else
install:
	@$(BIN)/python -c 'import laprox_sglang, pytest; from importlib.metadata import version; version("sglang")' || \
	{ echo "$(VENV) lacks the package: $(BIN)/python -m pip install -e '.[dev]'" >&2; exit 1; }
endif

clean:
	rm -rf .venv out build *.egg-info
