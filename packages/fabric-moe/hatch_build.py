"""Builds `fabric_moe._native`, the loops over rows, as one abi3 extension; works as fabric-core's hatch_build.py does.

Where there is no C compiler the package is built without it: numpy then does the same, several times slower.

Environment: FABRIC_CFLAGS and FABRIC_LDFLAGS are appended to the compiler's and linker's command lines.
FABRIC_VERBOSE=1 shows those command lines.
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
PACKAGE = ROOT / "src" / "fabric_moe"
NATIVE = PACKAGE / "native"
CACHE = ROOT / "build" / "native"
KEEP_BUILDS = 8

LIMITED_API = "-DPy_LIMITED_API=0x030b0000"
ABI_TAG = "cp311-abi3"


def have_compiler() -> bool:
    """Whether a C compiler runs here."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    return shutil.which(compiler[0]) is not None


def _load_build_script() -> ModuleType:
    path = NATIVE / "build_native.py"
    spec = importlib.util.spec_from_file_location("fabric_moe_build_native", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} is missing: the source tree is incomplete")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fingerprint(cflags: list[str], ldflags: list[str]) -> str:
    digest = hashlib.sha256()
    environment = [os.environ.get(name, "") for name in ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS")]
    for word in (sys.version, sysconfig.get_platform(), str(ROOT), *environment, *cflags, "|", *ldflags):
        digest.update(word.encode() + b"\0")
    patterns = ("*.c", "*.h", "*.py")
    inputs = [Path(__file__).resolve(), *sorted({path for pattern in patterns for path in NATIVE.rglob(pattern)})]
    for path in inputs:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def compile_native(*, force: bool = False) -> Path | None:
    """Return the path of an up-to-date extension below `build/native`, or None without a compiler."""
    cflags = shlex.split(os.environ.get("FABRIC_CFLAGS", ""))
    ldflags = shlex.split(os.environ.get("FABRIC_LDFLAGS", ""))
    if not have_compiler():
        print("fabric-moe: built without its C part, for want of a compiler: numpy takes its place", file=sys.stderr)
        return None
    folder = CACHE / _fingerprint(cflags, ldflags)[:16]
    ready = sorted(folder.glob("_native.*so"))
    if ready and not force:
        return ready[0]
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="tmp-") as work:
        ffi = _load_build_script().ffibuilder([LIMITED_API, *cflags], ldflags)
        with contextlib.redirect_stdout(sys.stderr):  # whoever asks for metadata reads our standard output
            built = Path(ffi.compile(tmpdir=work, verbose=bool(os.environ.get("FABRIC_VERBOSE"))))
        folder.mkdir(exist_ok=True)
        os.replace(built, folder / built.name)
    builds = [path for path in CACHE.iterdir() if not path.name.startswith("tmp-") and path.is_dir()]
    for old in sorted(builds, key=lambda path: path.stat().st_mtime, reverse=True)[KEEP_BUILDS:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder / built.name


def install_in_tree(extension: Path) -> Path:
    """Copy the extension beside the Python sources, where an editable install looks for it."""
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
        if extension is None:
            return
        if version == "editable":
            install_in_tree(extension)
        else:
            build_data["force_include"][str(extension)] = f"fabric_moe/{extension.name}"
        build_data["pure_python"] = False
        if ".abi3." in extension.name:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"{ABI_TAG}-{platform}"
        else:  # a free-threaded Python has no stable ABI yet
            build_data["infer_tag"] = True
