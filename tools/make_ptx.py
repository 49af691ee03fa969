"""Compile the GPU kernels to PTX, and put it where the C part includes it. Run after a change of kernels.cu.

Needs clang 14 (Debian: clang-14), and no CUDA. With --check: is what is there still what the source gives?
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent / "packages/fabric-core/src/fabric_core/native/cuda"
FLAGS = "--cuda-device-only --cuda-gpu-arch=sm_70 -nocudainc -nocudalib -Xclang -target-feature -Xclang +ptx63 -O3 -S"


def header(ptx: str) -> str:
    """Return PTX as lines of a C string, without its comments."""
    lines = [re.sub(r"\s*//.*", "", line).rstrip().replace("\t", " ") for line in ptx.splitlines()]
    body = "\n".join(f'"{line}\\n"' for line in lines if line)
    return f"/* Made by tools/make_ptx.py from kernels.cu: do not edit. */\n{body}\n"


def main() -> int:
    clang = shutil.which("clang-14")
    if clang is None:
        print("clang-14 is needed (apt-get install clang-14)", file=sys.stderr)
        return 1
    ran = subprocess.run(
        [clang, "-x", "cuda", *FLAGS.split(), "-Wno-unknown-cuda-version", str(HERE / "kernels.cu"), "-o", "-"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    made, out = header(ran.stdout), HERE / "kernels_ptx.h"
    if sys.argv[1:] == ["--check"]:
        if out.read_text() != made:
            print(f"{out.name} is not what kernels.cu gives: run tools/make_ptx.py", file=sys.stderr)
            return 1
        return 0
    out.write_text(made)
    print(f"{out}: {len(made)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
