# Two commands matter: `make serve` runs the server on the bundled model, `make test` runs the tests.
# Any Python >= 3.11 will do: make serve PYTHON=/path/to/python3.12
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
PORT ?= 8000
MODEL ?=
# workers and the servers that they start import the same modules: one compiles them, the others read
export PYTHONDONTWRITEBYTECODE :=
# one more than cores: tests wait for servers, timers and compilers
WORKERS := $$(($$(getconf _NPROCESSORS_ONLN) + 1))

.PHONY: serve test test-slow lint format docs clean

serve: $(VENV)/.server
	$(BIN)/jaxserve serve $(MODEL) --port $(PORT)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# What serves on a CPU, at full optimisation: an empty XLA_FLAGS keeps tests/conftest.py from asking for
# fast compilation, as it does for the rest: interpreted kernels, dry runs and commands.
OPTIMISED := tests/jaxserve tests/test_smoke.py \
	tests/pallas_kernels/paged_attention/test_xla.py tests/pallas_kernels/quantized_matmul/test_api.py
# SHARE=1/20: a twentieth of the cases
SHARE ?= 1/1
SLOW := $(BIN)/python -m pytest -n auto --dist worksteal -m slow --share $(SHARE)

test-slow: $(VENV)/.test .venv-clients/.clients
	XLA_FLAGS= $(SLOW) $(OPTIMISED)
	$(SLOW) tests $(addprefix --ignore=,$(OPTIMISED))

lint: $(VENV)/.test $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/hadolint deploy/docker/*.Dockerfile

format: $(VENV)/.lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# a site in build/site
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -f deploy/site/mkdocs.yml

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"jaxserve needs Python >= 3.11, this is {v.major}.{v.minor}: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.server: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[server]'
	touch $@

# torch goes first: with it in place nothing else pulls in a newer build of it
$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(PIP) torch==2.13.0
	$(PIP) -e '.[test]'
	touch $@ $(VENV)/.server

# clients whose requirements are at odds with those of jaxserve, and where there is npm those of Node
.venv-clients/.clients: tests/clients/requirements.txt tests/clients/package.json
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip --disable-pip-version-check install --quiet --no-compile -r $<
	cp tests/clients/package.json .venv-clients/
	! command -v npm >/dev/null || npm install --prefix .venv-clients --silent --no-audit --no-fund --no-package-lock
	touch $@

$(VENV)/.lint: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[lint]'
	touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .venv-clients .venv312-* build dist .pytest_cache .ruff_cache .mypy_cache
