"""Compile the C parts of all packages into the source tree, where an editable install finds them.

pip does this once, at `pip install -e`, and never again. The Makefile runs this after a C file changed; it calls the
code that pip calls (packages/*/hatch_build.py), without pip's isolated environment. A backend whose vendor headers are
not on this machine is left out, and says so.

FABRIC_CFLAGS and FABRIC_LDFLAGS are appended to the arguments of compiler and linker (-fsanitize=thread and the like).

usage: build_native.py [--force] [package ...]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import cffi

PACKAGES = Path(__file__).resolve().parent.parent / "packages"


def load_hook(package: str) -> ModuleType:
    hook = PACKAGES / package / "hatch_build.py"
    spec = importlib.util.spec_from_file_location(f"{package.replace('-', '_')}_hatch_build", hook)
    if spec is None or spec.loader is None or not hook.exists():
        raise FileNotFoundError(hook)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    known = sorted(path.parent.name for path in PACKAGES.glob("*/hatch_build.py"))
    parser = argparse.ArgumentParser(description="Compile the C parts of all packages into the source tree.")
    parser.add_argument("--force", action="store_true", help="compile even if nothing changed")
    parser.add_argument("package", nargs="*", help=f"of {', '.join(known)}; default: all")
    options = parser.parse_args()
    for package in options.package or known:
        extension = load_hook(package).extension()
        try:
            built = extension.compile(force=options.force)
        except cffi.VerificationError:
            print(f"{package}: its C does not compile: see the compiler's messages above", file=sys.stderr)
            return 1
        if built is not None:
            print(extension.install_in_tree(built))
    return 0


if __name__ == "__main__":
    sys.exit(main())
