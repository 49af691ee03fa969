#!/usr/bin/env bash
# The GPU tests and benchmarks on a machine that has CUDA, Python with pytest, and no package registry. Some 5 minutes.
#
#   here:  pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d WHEELS \
#              cffi pycparser msgspec pydantic pydantic_core annotated-types typing-inspection typing_extensions
#          make native                 # the extension is for every Python from 3.11 on
#   there: tools/bench/gpu_bare.sh WHEELS OUT
set -euo pipefail
wheels=$(realpath "$1")
out=$(realpath -m "$2")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
export PYTHONPATH="$site:$PWD/packages/fabric-core/src" PYTHONUNBUFFERED=1 CUDA_MODULE_LOADING=EAGER
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
# pytest's own settings are for a machine with all its plug-ins
tests() { "$@" python3 -m pytest -q -c /dev/null --rootdir=. -p no:cacheprovider -W ignore packages/fabric-core/tests/test_gpu.py; }
tests env
# Memory checks of our kernels, where the tool is there. Its own finds count, not the tests, which it slows. It takes additions to
# host memory for errors where the machine has no atomics over PCIe, so no test with stream_submit is among these.
if command -v compute-sanitizer >/dev/null; then
    PYTEST_ADDOPTS="-k 'inside_one_process or comes_and_goes or come_again or does_not_end'" \
        tests compute-sanitizer --tool memcheck --report-api-errors no --target-processes all >"$out/memcheck.txt" 2>&1 || true
    grep -E "ERROR SUMMARY|Invalid|passed|failed" "$out/memcheck.txt" || true
    if grep -qE "Invalid|ERROR SUMMARY: [1-9]" "$out/memcheck.txt"; then exit 1; fi
fi
python3 tools/bench/gpu.py --out "$out/gpu.md"
