"""Builds `fabric_core._native`, the C engine, as one abi3 extension.

Two callers: hatchling, when pip or uv builds a wheel or an editable install, and `tools/build_native.py`, when a
developer changed a C file. What goes into the extension (declarations, sources, warnings) is the business of
`src/fabric_core/native/build_native.py`; this file only decides when to compile and where the result goes.

Environment: FABRIC_CFLAGS and FABRIC_LDFLAGS are appended to the compiler's and linker's command lines, e.g. for a
sanitizer build. FABRIC_VERBOSE=1 shows those command lines.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src" / "fabric_core"
NATIVE = PACKAGE / "native"
BUILD_SCRIPT = NATIVE / "build_native.py"
CACHE = ROOT / "build" / "native"
KEEP_BUILDS = 8  # so that going back and forth between a plain and a sanitizer build compiles nothing

# The oldest Python whose stable ABI we compile for; the wheel's tag says the same.
LIMITED_API = "-DPy_LIMITED_API=0x030b0000"
ABI_TAG = "cp311-abi3"


def _load_build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fabric_build_native", BUILD_SCRIPT)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{BUILD_SCRIPT} is missing: the source tree is incomplete")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _inputs() -> list[Path]:
    patterns = ("*.c", "*.h", "*.py")
    found = {path for pattern in patterns for path in NATIVE.rglob(pattern)}
    return [Path(__file__).resolve(), *sorted(found)]


def _fingerprint(cflags: list[str], ldflags: list[str]) -> str:
    """Names everything that could change the binary, so that an unchanged tree is not compiled again.

    pip runs this hook twice for one editable install (once for the metadata, once for the wheel).
    """
    digest = hashlib.sha256()
    environment = [os.environ.get(name, "") for name in ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS")]
    for word in (sys.version, sysconfig.get_platform(), str(ROOT), *environment, *cflags, "|", *ldflags):
        digest.update(word.encode() + b"\0")
    for path in _inputs():
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _forget_old_builds() -> None:
    builds = [path for path in CACHE.iterdir() if not path.name.startswith("tmp-")]
    for old in sorted(builds, key=lambda path: path.stat().st_mtime, reverse=True)[KEEP_BUILDS:]:
        shutil.rmtree(old, ignore_errors=True)


def compile_native(*, force: bool = False) -> Path:
    """Return the path of an up-to-date extension below `build/native`, compiling it only if it is not there."""
    cflags = shlex.split(os.environ.get("FABRIC_CFLAGS", ""))
    ldflags = shlex.split(os.environ.get("FABRIC_LDFLAGS", ""))
    wanted = _fingerprint(cflags, ldflags)
    folder = CACHE / wanted[:16]
    ready = sorted(folder.glob("_native.*so"))
    if ready and not force:
        return ready[0]

    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="tmp-") as work:
        ffi = _load_build_script().ffibuilder([LIMITED_API, *cflags], ldflags)
        # Whoever asks for metadata reads our standard output: the compiler's chatter goes to standard error.
        with contextlib.redirect_stdout(sys.stderr):
            built = Path(ffi.compile(tmpdir=work, verbose=bool(os.environ.get("FABRIC_VERBOSE"))))
        folder.mkdir(exist_ok=True)
        os.replace(built, folder / built.name)
    _forget_old_builds()
    return folder / built.name


def install_in_tree(extension: Path) -> Path:
    """Copy the extension beside the Python sources, where an editable install looks for it.

    Written aside and renamed: a running process keeps the file it has mapped.
    """
    target = PACKAGE / extension.name
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(extension, aside)
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
    return target


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling's entry: puts the extension into the wheel and gives the wheel its tag."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        extension = compile_native()
        if version == "editable":
            install_in_tree(extension)
        else:
            build_data["force_include"][str(extension)] = f"fabric_core/{extension.name}"
        build_data["pure_python"] = False
        if ".abi3." in extension.name:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"{ABI_TAG}-{platform}"
        else:  # a free-threaded Python has no stable ABI yet
            build_data["infer_tag"] = True
