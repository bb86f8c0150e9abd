# The same verbs for people and machines. `make` alone lists them.
#
#   PARTS=short,long   what `make test` runs: short, long, matrix
#   VENV=.venv         where the environment lies
#   PYTHON=python3.12  which Python makes it (found by itself when not given)
#   ARGS="..."         handed to the command: make test ARGS="-k resume", make quickstart ARGS="recipe.steps=100"

VENV ?= .venv
WORKERS ?= 2
PARTS ?= short
RUN = $(VENV)/bin/python

.PHONY: help quickstart test test-fast test-long test-matrix test-slow test-isa test-torch lint format schema bench bench-counts bench-gpu bench-norms bench-parallel bench-quality bench-serve leaderboard claims pages docs clean

help:
	@echo "make quickstart   install, then train a small model on this machine's own Python sources (about 3 minutes)"
	@echo "make test-fast    the first test of each module, in about a minute"
	@echo "make test         the test suite but for what is marked long or slow; of the matrix the first cases"
	@echo "make test-long    what is marked long and has one case, and every command of docs/lectures.md"
	@echo "make test-matrix  the further cases of tests marked long: before a release, and after a change of kernels or layouts"
	@echo "make test-slow    what is marked slow: large matrices, compiled code, killed and restarted runs"
	@echo "make test-torch   all tests with another torch, in an environment of its own (TORCH=2.12.0)"
	@echo "make test-isa     the numerical tests once more, with this CPU's widest instructions switched off"
	@echo "make lint         ruff, formatting, types"
	@echo "make format       mend what ruff can mend"
	@echo "make schema       write planfile/schema.json anew, after a change of the spec"
	@echo "make bench        speed and memory beside transformers, and TRL where it is installed; encoding; start-up"
	@echo "make bench-counts  launches, bytes and host operations of a GPU's decode step and products, counted without one"
	@echo "make bench-gpu    kernels and whole steps on this machine's GPU beside torch, Liger and transformers (10 minutes; ARGS='--part serve': one of six parts)"
	@echo "make bench-norms  the gradient norm of each step by several ways, and what is wrong where they differ"
	@echo "make bench-parallel  every parallelism on 2 and 4 processes beside torch's own and picotron: speed, bubbles, memory"
	@echo "make bench-serve  the serving engine beside transformers, llama.cpp and vLLM: what is installed takes part (ARGS=--full)"
	@echo "make bench-quality  tokens per second over bits per byte of four designs, trained first (10 minutes)"
	@echo "make leaderboard  score the planner on every published run and kernel at hand, and write docs/accuracy.md (ARGS=FOLDER)"
	@echo "make claims       measure every figure the documentation states (SLOW=1: also the long ones; ONLY=id: one row)"
	@echo "make pages        write the generated parts of the pages anew: keys, verbs, tables, outputs of plan, pictures"
	@echo "make docs         build the pages as a site in build/site; no network is needed to read it"
	@echo "make clean        remove caches and build products; runs and $(VENV) stay"

quickstart: $(VENV)/.installed
	@$(VENV)/bin/meshwright quickstart $(ARGS)

# Tests start hundreds of processes: what one has compiled to bytecode, the next reads, whatever the user has set.
test test-fast test-long test-matrix test-slow test-isa claims: export PYTHONDONTWRITEBYTECODE =

# A worker that has nothing left takes tests over from another. Its last ones would else wait behind a long one.
PYTEST = $(RUN) -m pytest -n $(WORKERS) --dist worksteal --durations 20

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" --part $(PARTS) $(ARGS)

test-long: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" --part long $(ARGS)

test-fast: $(VENV)/.installed-dev
	$(PYTEST) --fast --durations 5 $(ARGS)

test-matrix: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" --part matrix $(ARGS)

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow $(ARGS)

# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu TORCH=2.12.0+cpu takes the build without CUDA, a tenth of the size.
test-torch:
	@test -n "$(TORCH)" || { echo "make test-torch TORCH=2.12.0: say which torch" >&2; exit 2; }
	@echo "torch==$(TORCH)" > .torch-$(TORCH).constraint
	PIP_CONSTRAINT=$(CURDIR)/.torch-$(TORCH).constraint $(MAKE) VENV=.venv-torch-$(TORCH) test test-long test-matrix test-slow

# Which kernels run depends on the CPU: on one with AVX-512 (and its 16-bit products) this tries what AVX2 has, on any
# other what every x86-64 has.
NUMERICAL = tests/kernels tests/parallel/test_context.py tests/model/test_transformer.py tests/formats/hub/test_logits.py
HAS_AVX512 = $(shell grep -c -m 1 avx512 /proc/cpuinfo 2>/dev/null)
LIMITS = $(if $(filter 1,$(HAS_AVX512)),ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2,ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default)
# Kernels for GPUs are compiled, whatever the CPU has: `make test-matrix` does it.
OF_GPUS = --ignore tests/kernels/test_triton.py --ignore tests/kernels/test_code_words.py
test-isa: $(VENV)/.installed-dev
	$(LIMITS) $(RUN) -m pytest -n $(WORKERS) $(NUMERICAL) $(OF_GPUS) $(ARGS)

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/.installed-dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

schema: $(VENV)/.installed-dev
	$(RUN) -c 'import json; from meshwright import planfile; print(json.dumps(planfile.schema(), indent=2))' \
	  > src/meshwright/planfile/schema.json

bench: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.train_speed $(ARGS)
	$(RUN) -m benchmarks.product_share
	$(RUN) -m benchmarks.product_rates
	$(RUN) -m benchmarks.documents
	$(RUN) -m benchmarks.recomputation
	$(RUN) -m benchmarks.kernel_errors
	$(RUN) -m benchmarks.tune_speed
	$(RUN) -m benchmarks.encoding
	$(RUN) -m benchmarks.startup

# liger_kernel and transformers take part where they are installed (docs/benchmarks/README.md).
bench-gpu: $(VENV)/.installed
	$(RUN) -m benchmarks.gpu $(ARGS)

# Launches, bytes and host operations of a GPU's work, counted on tensors without values: no GPU is needed.
bench-counts: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.decode_step $(ARGS)
	$(RUN) -m benchmarks.host_step
	$(RUN) -m benchmarks.quantized_estimate

# The gradient norm of each step by several ways: ARGS="--model llama-100m --precision bf16" on a GPU.
bench-norms: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.gradient_norms $(ARGS)

# picotron takes part where PICOTRON names its checkout (docs/parallel_speed.md).
bench-parallel: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.parallel_speed $(ARGS)
	$(RUN) -m benchmarks.parallel_memory
	$(RUN) -m benchmarks.context

# transformers is installed; llama-cpp-python and vllm take part where they are (docs/benchmarks.md).
bench-serve: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.serve $(ARGS)

# Tokens per second over bits per byte of four designs, trained first (docs/serve-quality.md).
bench-quality: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.serve_quality $(ARGS)

# The published tables are no part of the repository: docs/accuracy.md says what they hold.
leaderboard: $(VENV)/.installed-dev
	$(RUN) -m evaluation.leaderboard --write $(ARGS)
	$(RUN) -m benchmarks.kernel_times --page $(ARGS)
	$(RUN) -m benchmarks.measured_peaks --plan
	$(RUN) -m benchmarks.measured_steps

claims: $(VENV)/.installed-dev
	$(RUN) -m claims.run $(if $(SLOW),--slow) $(if $(ONLY),--only $(ONLY)) $(ARGS)

pages: $(VENV)/.installed
	$(RUN) -m docs.generate
	$(RUN) -m docs.pictures.draw
	$(RUN) -m docs.architecture

docs: $(VENV)/.installed-docs
	$(RUN) -m docs.site

clean:
	rm -rf build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .coverage
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# The stamps are younger than pyproject.toml exactly when its dependencies are installed.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing Meshwright into $(VENV); torch is the big piece, once."
	$(RUN) -m pip install --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/pip
	@echo "Installing Meshwright and its development tools into $(VENV); torch is the big piece, once."
	$(RUN) -m pip install --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/.installed
	$(RUN) -m pip install --disable-pip-version-check --editable '.[docs]'
	@touch $@

# A Python without ensurepip (Debian's python3 without python3-venv) lends its own pip to the new environment.
$(VENV)/bin/pip:
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && found=$$python && break; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "Meshwright needs Python 3.11, 3.12 or 3.13; here is $$($(or $(PYTHON),python3) --version 2>/dev/null || echo none):" \
	    "install one, or name it: make PYTHON=/path/to/python3.12" >&2; \
	  exit 2; \
	fi; \
	$$found -m venv --clear $(VENV) 2>/dev/null || { \
	  $$found -m venv --clear --without-pip $(VENV) && \
	  $$found -m pip --disable-pip-version-check --quiet --python $(VENV)/bin/python install pip; \
	} || { \
	  rm -rf $(VENV); \
	  echo "Cannot make an environment in $(VENV): $$found has neither venv nor pip;" \
	    "install them (Debian, Ubuntu: apt install python3-venv)" >&2; \
	  exit 2; \
	}
