# The two commands a stranger needs: `make demo` and `make test`. Everything else is for working on Quire.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.demo

.PHONY: demo demo-vllm test test-slow test-slow-short test-all test-chart test-engines test-engines-short test-gpu gpu-bundle test-s3 test-ceph test-ucx test-rdma fuzz test-containers test-images chaos operations soak simulate explore mutations mutants check coverage release docs format locks generated proto bench clean

# Modules are compiled when they are first imported: most of the 14,000 that come along never are.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt

$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[tools]'
	touch $(DEMO_STAMP)

$(STAMP): $(DEMO_STAMP)
	$(INSTALL) -e '.[dev]' -e benchmarks
	touch $(STAMP)

demo: $(DEMO_STAMP)     ## a real model reuses a prefix that another process computed
	$(BIN)/quire demo

WORKERS ?= 2
# Many failures have one cause, and each may have waited for a time-out.
# One thread of torch a process: more wait for each other where every processor has a worker.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --maxfail 30
FORKED := QUIRE_TEST_FORK=1 $(PYTEST)
AS_USERS := $(PYTEST) tests/e2e/test_cache_control.py tests/e2e/test_page.py
test: $(STAMP)          ## the suite, on real parts: two workers, services forked (CONTRIBUTING.md says how)
	$(FORKED)

test-slow: $(STAMP)     ## the tests that take over ten seconds, more of the simulator's days, services started as users do
	$(FORKED) -m slow
	$(AS_USERS)
	QUIRE_SIMULATION_SEEDS=12 QUIRE_EXPLORED_STATES=1500 $(FORKED) tests/simulation -k "not known_fault"

# The others test in depth what `make test` tests in short.
test-slow-short: $(STAMP) ## of these what CI runs: the demo, faults under load, upgrades and releases
	$(FORKED) -m slow tests/e2e tests/chaos tests/integration/test_release.py -k "not up_starts_again"
	$(AS_USERS)

test-all: $(STAMP)      ## everything, one test after the other, services started as users start them
	QUIRE_TEST_LONG=1 QUIRE_SIMULATION_SEEDS=24 QUIRE_EXPLORED_STATES=2500 $(BIN)/python -m pytest --timeout 400 -m ''

CHARTS := $(VENV)/.charts
$(CHARTS): $(STAMP)
	$(INSTALL) helm-python-sdk
	touch $(CHARTS)

test-chart: $(CHARTS)   ## the Helm chart, rendered by Helm's own code, and the manifests that are made from it
	$(BIN)/python tools/manifests.py --check
	$(BIN)/python -m pytest tests/unit/test_helm.py

BUNDLE_PYTHON ?= 3.12
test-gpu: $(STAMP)      ## on a machine with an NVIDIA GPU: order of copies, delivery, overlap, logits, decoding; build/gpu/report.md
	$(BIN)/python tools/gpu_report.py

gpu-bundle: $(STAMP)    ## the same, packed for a GPU machine without a network: make gpu-bundle BUNDLE_PYTHON=3.12
	$(BIN)/python tools/gpu_bundle.py --python $(BUNDLE_PYTHON) build/quire-gpu.tar.xz

test-s3: $(STAMP)       ## the object tier on a real S3 server: QUIRE_TEST_S3_URL=s3://bucket/prefix, AWS_ENDPOINT_URL, keys
	$(BIN)/python -m pytest tests/e2e/test_durability.py -k real_s3

S3_TESTS ?= https://github.com/ceph/s3-tests
S3_TESTS_COMMIT := 8f0ae7b
test-ceph: $(STAMP)     ## Ceph's tests of S3 (ceph/s3-tests) against a local cluster, compared with the list of those that pass
	[ -d build/s3-tests ] || git clone -q $(S3_TESTS) build/s3-tests
	git -C build/s3-tests checkout -q $(S3_TESTS_COMMIT)
	[ -d build/s3-tests/.venv ] || $(PYTHON) -m venv build/s3-tests/.venv
	build/s3-tests/.venv/bin/python -m pip install -q -r build/s3-tests/requirements.txt pytest-timeout pytest-xdist
	$(BIN)/python -m tests.ceph.run build/s3-tests build/s3-tests/.venv/bin/python

fuzz: $(STAMP)          ## what strangers send to the S3 frontend, coverage-guided, two minutes each; the corpus is kept
	for name in chunked headers bodies descriptors ranges; do \
	  $(BIN)/python -m tests.fuzz.run $$name tests/fuzz/corpus/$$name -max_total_time=120 || exit 1; done

# With podman: make test-containers BUILD='podman build' COMPOSE=podman-compose PODMAN=podman
BUILD ?= docker build
COMPOSE ?= docker compose
PODMAN ?=
UCX_VERSIONS := 1.15.0.post2 1.16.0.post2 1.17.0 1.18.1 1.19.0 1.20.0 1.21.0 1.22.0
test-ucx: $(STAMP)      ## which versions of UCX transfer bytes between each other: every pair, over TCP
	for version in $(UCX_VERSIONS); do \
	  [ -d build/ucx/$$version ] || $(BIN)/python -m pip install -q --no-deps --target build/ucx/$$version libucx-cu12==$$version \
	    || exit 1; \
	done
	QUIRE_TEST_UCX=build/ucx $(BIN)/python -m pytest -n 2 -m '' --timeout 120 tests/versions

test-rdma: $(STAMP)     ## stores and deliveries over RDMA verbs without a card: soft-RoCE in a virtual machine (QEMU)
	$(BIN)/python -m tests.rdma.machine --timeout 400 tests/contract/test_transport.py tests/rdma -k "UcxTransport or rdma"

test-containers: $(STAMP) ## the images built, the compose file and the Kubernetes pods up, the demo against them
	for role in orchestrator scheduler gateway storage decoder; do \
	  $(BUILD) --target $$role -t quire-$$role -t quire-$$role:$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) . \
	    || exit 1; done
	QUIRE_TEST_COMPOSE='$(COMPOSE)' QUIRE_TEST_PODMAN='$(PODMAN)' $(BIN)/python -m pytest --timeout 600 tests/containers

# With podman: make test-images REBUILD='podman build --timestamp 0' PODMAN=podman
REBUILD ?= docker buildx build --output type=docker,rewrite-timestamp=true --build-arg SOURCE_DATE_EPOCH=0
test-images: $(STAMP)   ## images built twice, with no cache: the same bytes; compiles UCX four times
	QUIRE_TEST_BUILD='$(REBUILD)' QUIRE_TEST_PODMAN='$(PODMAN)' $(BIN)/python -m pytest tests/containers/test_images.py

# Real vLLM on the CPU (AVX2), 2.5 GB, in an environment of its own. Where pip would take a torch with CUDA:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ENGINES ?= .venv-engines
ENGINES_STAMP := $(ENGINES)/.installed
$(ENGINES_STAMP): pyproject.toml tests/engines/requirements.txt tests/engines/vllm.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --disable-pip-version-check --no-deps -r tests/engines/requirements.txt
	$(ENGINES)/bin/python -m pip install --disable-pip-version-check --no-deps -r tests/engines/vllm.txt
	$(ENGINES)/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e . -e benchmarks
	touch $(ENGINES_STAMP)

# LMCache and SGLang, on top of it: LMCache's numba breaks vLLM's server.
MORE := $(ENGINES)-more
MORE_STAMP := $(MORE)/.installed
$(MORE_STAMP): $(ENGINES_STAMP) tests/engines/more.txt
	$(PYTHON) -m venv $(MORE)
	$(MORE)/bin/python -m pip install --disable-pip-version-check --no-deps -r tests/engines/more.txt
	$(MORE)/bin/python -c "import site, sys; print(f'import site; site.addsitedir({sys.argv[1]!r})', \
	  file=open(site.getsitepackages()[0] + '/engines.pth', 'w'))" \
	  "$$($(ENGINES)/bin/python -c 'import site; print(site.getsitepackages()[0])')"
	touch $(MORE_STAMP)

demo-vllm: $(ENGINES_STAMP) ## vLLM processes share a prefix through Quire, one prefills for another; a node and an engine die
	$(ENGINES)/bin/quire demo-vllm

test-engines: $(MORE_STAMP) ## real vLLM, LMCache and SGLang with Quire: their tokens, whatever happens to the cache
	$(ENGINES)/bin/python -m pytest tests/engines
	$(MORE)/bin/python -m pytest tests/engines/test_lmcache.py tests/engines/test_hicache.py tests/engines/test_sglang.py tests/engines/test_nixl.py

test-engines-short: $(ENGINES_STAMP) ## of vLLM what CI runs
	$(ENGINES)/bin/python -m pytest tests/engines/test_vllm.py -k 'cold_and_warm or share_a_failed or killed_in_the'

SECONDS ?= 300
SEED ?= $(shell date +%s)
chaos: $(STAMP)         ## faults at random under load: make chaos SECONDS=300 SEED=1 (as root also networks that are cut)
	QUIRE_CHAOS_SECONDS=$(SECONDS) QUIRE_CHAOS_SEED=$(SEED) $(BIN)/python -m pytest -s -m '' tests/chaos/test_chaos.py
	QUIRE_TEST_LONG=1 $(BIN)/python -m pytest --timeout 400 -m '' tests/e2e/test_graceful.py tests/e2e/test_cli.py tests/unit/decoder/test_built_engines.py

SEEDS ?= 2000
STATES ?= 200000
simulate: $(STAMP)      ## a cluster's bad days on virtual time, by seed; goes on where it was stopped: make simulate SEEDS=20000
	$(BIN)/python -m tests.simulation.run --seeds 1:$$(($(SEEDS) + 1)) --results build/simulation.jsonl

mutations: $(STAMP)     ## known faults put back: the simulator has to find each within a thousand seeds
	QUIRE_MUTATION_SEEDS=1000 $(BIN)/python -m pytest -s -m '' tests/simulation -k known_fault

explore: $(STAMP)       ## every order of events of a tiny cluster, breadth first: make explore STATES=200000
	PYTHONHASHSEED=0 $(BIN)/python -m tests.simulation.exploration --states $(STATES)

operations: $(STAMP)    ## what an operator does: upgrade, rolls, fewer nodes, certificates, backups, health, alerts, another user
	QUIRE_TEST_LONG=1 $(BIN)/python -m pytest --timeout 400 -m '' tests/e2e/test_operations.py tests/e2e/test_graceful.py \
	  tests/e2e/test_upgrade.py tests/e2e/test_redis_lost.py tests/e2e/test_confined.py tests/unit/test_k8s.py \
	  tests/e2e/test_dashboards.py tests/e2e/test_authority.py tests/e2e/test_readiness.py tests/e2e/test_draining.py \
	  tests/e2e/test_health.py tests/e2e/test_alertmanager.py tests/e2e/test_support_bundle.py tests/e2e/test_starved.py

soak: $(STAMP)          ## kill -9 under load, the engine against its model, an hour of a production trace in ten minutes
	QUIRE_SOAK_SECONDS=600 QUIRE_SOAK_TRACE_S=3600 $(BIN)/python -m pytest -s -m '' tests/chaos/test_soak.py
	QUIRE_SOAK_ROUNDS=60 $(BIN)/python -m pytest --timeout 1800 tests/e2e/test_durability.py -k again_and_again
	QUIRE_SOAK_EXAMPLES=2000 $(BIN)/python -m pytest --timeout 1800 tests/integration/engine/test_model.py

check: $(STAMP)         ## format, lint, types, generated code and pages, the documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python protos/generate.py --check
	$(BIN)/python tools/generated.py --check
	$(BIN)/python tools/reference.py --check
	$(BIN)/zensical build --strict --config-file mkdocs.yml

MUTANTS := $(VENV)/.mutants
$(MUTANTS): $(STAMP)
	$(INSTALL) mutmut
	touch $(MUTANTS)

SCOPE ?= pacing permits
mutants: $(MUTANTS)     ## one thing changed at a time: what no test notices: make mutants SCOPE='index residency' (an hour)
	$(BIN)/python tools/mutants.py $(SCOPE)

coverage: $(STAMP)      ## of the parts that decide and of the wire format, by branches: at least 95%
	$(PYTEST) tests/unit tests/contract tests/integration tests/fuzz \
	  --cov-branch --cov-report=term --cov-report=json:build/coverage.json $(foreach name,\
	  quire.model quire.wire quire_storage.core quire_scheduler.core quire_decoder.core quire_orchestrator.core quire_gateway.core,--cov=$(name))
	$(BIN)/python tools/branches.py build/coverage.json

TAG ?= $(shell git describe --tags --exact-match 2>/dev/null)
IMAGES ?= orchestrator scheduler gateway storage decoder
release: $(STAMP)    ## of a tag: wheels, chart, bill of materials, checksums in dist; then the images: make release TAG=v0.3.0 IMAGES=
	$(BIN)/python tools/release.py "$(TAG)" dist
	for role in $(IMAGES); do \
	  git archive "$(TAG)" | $(BUILD) --target $$role -t quire-$$role:$(TAG:v%=%) --build-arg VERSION=$(TAG:v%=%) \
	    --build-arg REVISION=$$(git rev-parse "$(TAG)^{commit}") - || exit 1; done

# With links to edit pages: QUIRE_REPOSITORY=https://github.com/OWNER/NAME QUIRE_EDIT_URI=edit/main/docs/ make docs
docs: $(STAMP)          ## the documentation as a site, in build/site
	$(BIN)/zensical build --strict --config-file mkdocs.yml

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generated: $(CHARTS)    ## what is made from the code: names of variables, alerts, manifests for Kubernetes, reference pages
	$(BIN)/python tools/generated.py
	$(BIN)/python tools/manifests.py
	$(BIN)/python tools/reference.py

# What the images install, with hashes. TORCH is where the decoder's CPU build of torch comes from.
TORCH ?= --index https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match
LOCK := $(BIN)/uv pip compile --quiet --generate-hashes --universal --python-version 3.11 --no-annotate \
  --custom-compile-command 'make locks' --constraint constraints.txt
IMAGE := --extra cli --extra latents
locks: $(STAMP)         ## locks/, what the images install, from constraints.txt
	$(INSTALL) uv
	echo 'hatchling>=1.27' | $(LOCK) - --output-file locks/build.txt
	$(LOCK) pyproject.toml $(IMAGE) --output-file locks/services.txt
	echo 'torch==2.13.0+cpu' | $(LOCK) pyproject.toml $(IMAGE) --extra decoder --extra provenance $(TORCH) --constraint - \
	  --output-file locks/decoder.txt
	$(LOCK) pyproject.toml $(IMAGE) --extra decoder --extra provenance --output-file locks/decoder-cuda.txt

proto: $(STAMP)         ## regenerate libs/quire/wire/v1 from protos/
	$(BIN)/python protos/generate.py

bench: $(STAMP)         ## the benchmarks of the README, with figures
	$(BIN)/quire bench index --json bench-index.json --plot bench-index.png
	$(BIN)/quire bench lookup --json bench-lookup.json --plot bench-lookup.png
	$(BIN)/quire bench delivery --json bench-delivery.json --plot bench-delivery.png
	$(BIN)/quire bench delivery --tier drives --context 32768 --json bench-drives.json --plot bench-drives.png
	$(BIN)/quire bench store --json bench-store.json --plot bench-store.png
	$(BIN)/quire bench pool --json bench-pool.json --plot bench-pool.png
	$(BIN)/quire bench recover --json bench-recover.json --plot bench-recover.png

clean:
	rm -rf $(VENV) quire-demo
