#!/usr/bin/env bash
# The GPU tests and benchmarks on a machine that has CUDA, Python with pytest, and no package registry.
#
#   here:  pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d WHEELS \
#              cffi pycparser msgspec pydantic pydantic_core annotated-types typing-inspection typing_extensions
#          make native                 # the extension is for every Python from 3.11 on
#   there: tools/bench/gpu_bare.sh WHEELS OUT
set -euo pipefail
wheels=$(realpath "$1")
out=$2
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
export PYTHONPATH="$site:$PWD/packages/fabric-core/src" PYTHONUNBUFFERED=1 CUDA_MODULE_LOADING=EAGER
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
# pytest's own settings are for a machine with all its plug-ins
python3 -m pytest -q -c /dev/null --rootdir=. -p no:cacheprovider -W ignore packages/fabric-core/tests/test_gpu.py
python3 tools/bench/gpu.py --out "$out/gpu.md"
