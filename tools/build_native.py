"""Compile fabric-core's C engine into the source tree, where an editable install finds it.

pip does this once, at `pip install -e`, and never again. The Makefile runs this after a C file changed; it calls the
code that pip calls (packages/fabric-core/hatch_build.py), without pip's isolated environment.

FABRIC_CFLAGS and FABRIC_LDFLAGS are appended to the arguments of compiler and linker (-fsanitize=thread and the like).

usage: build_native.py [--force]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import cffi

HOOK = Path(__file__).resolve().parent.parent / "packages" / "fabric-core" / "hatch_build.py"


def load_hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fabric_core_hatch_build", HOOK)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(HOOK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile fabric-core's C engine into the source tree.")
    parser.add_argument("--force", action="store_true", help="compile even if nothing changed")
    options = parser.parse_args()
    hook = load_hook()
    try:
        extension = hook.compile_native(force=options.force)
    except cffi.VerificationError:
        print("the C engine does not compile: see the compiler's messages above", file=sys.stderr)
        return 1
    print(hook.install_in_tree(extension))
    return 0


if __name__ == "__main__":
    sys.exit(main())
