# SPDX-License-Identifier: Apache-2.0
# make demo | test | install | bench | lint | clean. Everything happens in .venv.

PYTHON ?= python3
VENV   ?= .venv
# Where there is no GPU, a torch that is built for the CPU on many systems; any other will do:
# make TORCH="torch==2.14.1" demo
TORCH  ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch==2.14.1,torch==2.13.0)
# Where the demo keeps parameters between their uses: cpu, nvme (files in out/nvme) or checkpoint (in place
# in the model's own file).
OFFLOAD ?= cpu

# Test processes at once; 0 runs the tests one after the other.
TEST_JOBS ?= 2

BIN     := $(abspath $(VENV))/bin
TOOLS   := $(VENV)/.tools
BUILT   := $(VENV)/.built
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml
export PATH := $(BIN):$(PATH)

.PHONY: demo known-offload test cpp-test python-test install bench lint format clean

demo: known-offload install
	$(BIN)/python examples/lora_minilm.py --offload $(OFFLOAD)

known-offload:
	@$(if $(filter "cpu" "nvme" "checkpoint","$(OFFLOAD)"),:,$(error OFFLOAD is "$(OFFLOAD)", but must be cpu, nvme or checkpoint))

test: cpp-test python-test

cpp-test: $(TOOLS)
	scripts/cpp_tests.sh

python-test: install
	$(BIN)/python -m pytest -n $(TEST_JOBS)

install: $(BUILT)

bench: install
	$(BIN)/python -m pytest benchmarks/bench_adamw.py benchmarks/bench_engine_step.py benchmarks/bench_optimizer.py benchmarks/bench_stream.py benchmarks/bench_start.py benchmarks/bench_io.py -s

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files 'csrc/*' 'tests/cpp/*' | grep -E '\.(h|cpp|cu|cuh)$$' | xargs $(BIN)/clang-format --dry-run --Werror

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files 'csrc/*' 'tests/cpp/*' | grep -E '\.(h|cpp|cu|cuh)$$' | xargs $(BIN)/clang-format -i

$(TOOLS): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet $(TORCH) numpy "pybind11>=3.0" ninja "cmake>=3.25"
	touch $@

$(BUILT): $(TOOLS) $(SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $@

clean:
	rm -rf build dist *.egg-info peftds_ext/_native/*.so $(BUILT)
