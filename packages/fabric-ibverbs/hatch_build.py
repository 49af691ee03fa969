"""Builds `fabric_ibverbs._native`, the verbs domain, as one abi3 extension; works as fabric-core's hatch_build.py does.

libibverbs itself is loaded at run time, but its headers are needed here. Where they are missing the package is built
without the extension and says so when it is used: everything else of a workspace must install on a bare machine.

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
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src" / "fabric_ibverbs"
NATIVE = PACKAGE / "native"
CACHE = ROOT / "build" / "native"
SIBLING = ROOT.parent / "fabric-core" / "src" / "fabric_core" / "native" / "include"
KEEP_BUILDS = 8

LIMITED_API = "-DPy_LIMITED_API=0x030b0000"
ABI_TAG = "cp311-abi3"


def core_include() -> Path:
    """Return the folder with fabric/domain.h: the sibling's in a source tree, else the installed fabric-core's."""
    if (SIBLING / "fabric" / "domain.h").is_file():
        return SIBLING
    import fabric_core

    return Path(fabric_core.get_include())


def have_headers(cflags: list[str]) -> bool:
    """Whether the compiler finds libibverbs's headers."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    flags = [*shlex.split(os.environ.get("CPPFLAGS", "")), *shlex.split(os.environ.get("CFLAGS", "")), *cflags]
    try:
        tried = subprocess.run(
            [*compiler[:1], *flags, "-E", "-x", "c", "-"],
            input=b"#include <infiniband/verbs.h>\n",
            capture_output=True,
            check=False,
        )
    except OSError:
        return False
    return tried.returncode == 0


def _load_build_script() -> ModuleType:
    path = NATIVE / "build_native.py"
    spec = importlib.util.spec_from_file_location("fabric_ibverbs_build_native", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} is missing: the source tree is incomplete")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fingerprint(include: Path, cflags: list[str], ldflags: list[str]) -> str:
    digest = hashlib.sha256()
    environment = [os.environ.get(name, "") for name in ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS")]
    for word in (sys.version, sysconfig.get_platform(), str(ROOT), *environment, *cflags, "|", *ldflags):
        digest.update(word.encode() + b"\0")
    patterns = ("*.c", "*.h", "*.py")
    inputs = [Path(__file__).resolve(), *sorted({path for pattern in patterns for path in NATIVE.rglob(pattern)})]
    for path in [*inputs, *sorted(include.rglob("*.h"))]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def compile_native(*, force: bool = False) -> Path | None:
    """Return the path of an up-to-date extension below `build/native`, or None without libibverbs's headers."""
    cflags = shlex.split(os.environ.get("FABRIC_CFLAGS", ""))
    ldflags = shlex.split(os.environ.get("FABRIC_LDFLAGS", ""))
    if not have_headers(cflags):
        print("fabric-ibverbs: built without libibverbs's headers (libibverbs-dev): it will not open", file=sys.stderr)
        return None
    include = core_include()
    folder = CACHE / _fingerprint(include, cflags, ldflags)[:16]
    ready = sorted(folder.glob("_native.*so"))
    if ready and not force:
        return ready[0]
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="tmp-") as work:
        ffi = _load_build_script().ffibuilder(include, [LIMITED_API, *cflags], ldflags)
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

    def dependencies(self) -> list[str]:
        return [] if SIBLING.is_dir() else ["fabric-core"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        extension = compile_native()
        if extension is None:
            return
        if version == "editable":
            install_in_tree(extension)
        else:
            build_data["force_include"][str(extension)] = f"fabric_ibverbs/{extension.name}"
        build_data["pure_python"] = False
        if ".abi3." in extension.name:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"{ABI_TAG}-{platform}"
        else:  # a free-threaded Python has no stable ABI yet
            build_data["infer_tag"] = True
