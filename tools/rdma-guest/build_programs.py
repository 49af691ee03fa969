#!/usr/bin/env python3
"""Compile the C programs that run in the guest: packages/fabric-ibverbs/tests/c/*.c, with the engine and the backend.

They drive both without Python, which is 12 times slower in there; a C compiler is too, so this runs before the guest
starts. Only what changed is compiled again. The programs are build/verbs/NAME.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "packages/fabric-core/src/fabric_core/native"
VERBS = ROOT / "packages/fabric-ibverbs/src/fabric_ibverbs/native"
PROGRAMS = ROOT / "packages/fabric-ibverbs/tests/c"
OUT = ROOT / "build" / "verbs"
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-pthread"]
INCLUDE = [f"-I{CORE / 'include'}", f"-I{CORE}", f"-I{VERBS}"]


def newest(folders: list[Path]) -> float:
    """Return when the last of the headers changed."""
    return max(path.stat().st_mtime for folder in folders for path in folder.rglob("*.h"))


def compiled(source: Path, headers: float, compiler: str) -> Path:
    """Return the object of a source, compiled if it or any header is newer."""
    target = OUT / f"{source.parent.parent.name}_{source.parent.name}_{source.stem}.o"
    if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime, headers):
        more = shlex.split(os.environ.get("FABRIC_CFLAGS", ""))
        aside = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *FLAGS, *INCLUDE, *more, "-c", str(source), "-o", str(aside)], check=True)
        os.replace(aside, target)
    return target


def main() -> int:
    """Build all programs."""
    OUT.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "cc")
    script = [sys.executable, str(CORE / "build_native.py"), "--print-sources"]
    listed = subprocess.run(script, capture_output=True, text=True, check=True).stdout.split()
    headers = newest([CORE, VERBS, PROGRAMS])
    shared = [compiled(source, headers, compiler) for source in [*map(Path, listed), *sorted(VERBS.glob("*.c"))]]
    for program in sorted(PROGRAMS.glob("*.c")):
        objects = [compiled(program, headers, compiler), *shared]
        target = OUT / program.stem
        if not target.exists() or target.stat().st_mtime < max(path.stat().st_mtime for path in objects):
            words = [compiler, *map(str, objects), "-pthread", "-ldl", "-lrt", "-o", f"{target}.new"]
            subprocess.run(words, check=True)
            os.replace(f"{target}.new", target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
