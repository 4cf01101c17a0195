# The same words everywhere: setup fmt check test demo.
PYTHON ?= python3.11
VENV ?= .venv
DISTS := protos libs/core libs/agents libs/payloads libs/weights libs/runtime libs/cli \
	services/experience services/rollout services/trainer services/refit
TOOLS := ruff pyright[nodejs] import-linter buf-bin pytest pytest-asyncio pytest-timeout hypothesis \
	types-PyYAML types-protobuf types-grpcio types-grpcio-health-checking types-grpcio-reflection types-grpcio-status
BUILD := hatchling editables grpcio-tools mypy-protobuf
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export OMP_NUM_THREADS ?= 1

.PHONY: setup protos fmt check test demo
setup: $(VENV)/.done  ## Everything editable, in one environment

$(VENV)/.done: constraints.txt $(DISTS:%=%/pyproject.toml) $(wildcard protos/treadle/*/v1/*.proto) protos/generate.py
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	pip install -q -c constraints.txt $(BUILD) $(TOOLS)
	pip install -q -c constraints.txt --no-build-isolation $(addprefix -e ,$(DISTS))
	touch $@

protos: setup  ## The generated contract, after a change of a .proto file
	python tools/protos.py

fmt: setup
	ruff format . && ruff check --fix . && buf format -w

check: setup
	ruff format --check . && ruff check . && pyright
	buf lint && buf format -d --exit-code
	lint-imports

test: setup
	pytest -q

