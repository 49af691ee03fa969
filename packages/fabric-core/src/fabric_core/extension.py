"""Builds the C of a package into one extension, `PACKAGE._native`: for hatch_build.py of our packages and of anybody's.

    extension = Extension(ROOT, "fabric_efa", cdef="cdef_efa.h", needs="rdma/fi_rma.h", libraries=["dl"])
    extension.build_into(version, build_data)

Two callers: hatchling, when pip or uv builds a wheel or an editable install, and `tools/build_native.py`, when a
developer changed a C file. The sources are `src/PACKAGE/native/*.c`; what Python may call of them stands in a header
there, between the marks `cdef-begin` and `cdef-end`. The result is for Python's stable ABI, and is kept below
`build/native` for as long as nothing changes that goes into it.

Environment: FABRIC_CFLAGS and FABRIC_LDFLAGS are appended to the compiler's and linker's command lines, e.g. for a
sanitizer build. FABRIC_VERBOSE=1 shows those command lines.

Only the standard library is imported here, and cffi when something is compiled: in a source tree this file is loaded by
its path, before fabric-core is built.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["CFLAGS", "INCLUDE", "Extension", "declarations"]

#: Where `fabric/domain.h` is.
INCLUDE = Path(__file__).resolve().parent / "native" / "include"
CFLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread")

_KEPT = 8  # builds, so that going back and forth between a plain and a sanitizer build compiles nothing
# The oldest Python whose stable ABI we compile for; the wheel's tag says the same.
_LIMITED_API = "-DPy_LIMITED_API=0x030b0000"
_ABI_TAG = "cp311-abi3"

Builder = Callable[[list[str], list[str]], Any]


def declarations(header: Path) -> str:
    """Return what cffi can read of a header: comments and preprocessor lines taken out.

    A header with a `cdef-begin` mark gives only what stands between it and `cdef-end`.
    """
    text = header.read_text()
    marked = re.search(r"/\* cdef-begin.*?\*/(.*)/\* cdef-end \*/", text, re.DOTALL)
    if marked:
        text = marked.group(1)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r'^\s*(#.*|extern "C" \{|\}\s*)$', "", text, flags=re.MULTILINE)
    return text.replace("1u << ", "1 << ").replace("= 1u", "= 1").replace("= 0u", "= 0")


class Extension:
    """What is built, and where it goes.

    `root`: the folder of the package's hatch_build.py. `cdef`: the header with the declarations. `needs`: a header
    without which nothing is built, since the rest of a workspace must install on a bare machine; `without` says then
    what is missing. `builder(cflags, ldflags)`: returns the FFI object instead, ready to compile, all paths absolute.
    """

    def __init__(
        self,
        root: Path,
        package: str,
        *,
        cdef: str = "",
        needs: str = "",
        without: str = "",
        cflags: Sequence[str] = CFLAGS,
        libraries: Sequence[str] = (),
        builder: Builder | None = None,
    ) -> None:
        self.root = root
        self.package = package
        self.native = root / "src" / package / "native"
        self.cache = root / "build" / "native"
        self._cdef = cdef
        self._needs = needs
        self._without = without
        self._cflags = cflags
        self._libraries = libraries
        self._builder = builder or self._ffi

    def compile(self, *, force: bool = False) -> Path | None:
        """Return the path of an up-to-date extension below `build/native`, compiling it only if it is not there.

        None, and a line on standard error, without the header that it needs.
        """
        cflags = shlex.split(os.environ.get("FABRIC_CFLAGS", ""))
        ldflags = shlex.split(os.environ.get("FABRIC_LDFLAGS", ""))
        if self._needs and not _finds(self._needs, cflags):
            print(f"{self.package.replace('_', '-')}: {self._without}", file=sys.stderr)
            return None
        folder = self.cache / self._fingerprint(cflags, ldflags)[:16]
        ready = sorted(folder.glob("_native.*so"))
        if ready and not force:
            return ready[0]
        self.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.cache, prefix="tmp-") as work:
            ffi = self._builder([_LIMITED_API, *cflags], ldflags)
            # Whoever asks for metadata reads our standard output: the compiler's chatter goes to standard error.
            with contextlib.redirect_stdout(sys.stderr):
                built = Path(ffi.compile(tmpdir=work, verbose=bool(os.environ.get("FABRIC_VERBOSE"))))
            folder.mkdir(exist_ok=True)
            os.replace(built, folder / built.name)
        self._forget_old()
        return folder / built.name

    def install_in_tree(self, extension: Path) -> Path:
        """Copy the extension beside the Python sources, where an editable install looks for it.

        Written aside and renamed: a running process keeps the file it has mapped.
        """
        target = self.native.parent / extension.name
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            shutil.copyfile(extension, aside)
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)
        return target

    def build_into(self, version: str, build_data: dict[str, Any]) -> None:
        """Do the work of hatchling's build hook: put the extension into the wheel, and give the wheel its tag."""
        extension = self.compile()
        if extension is None:
            return
        if version == "editable":
            self.install_in_tree(extension)
        else:
            build_data["force_include"][str(extension)] = f"{self.package}/{extension.name}"
        build_data["pure_python"] = False
        if ".abi3." in extension.name:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"{_ABI_TAG}-{platform}"
        else:  # a free-threaded Python has no stable ABI yet
            build_data["infer_tag"] = True

    def _ffi(self, cflags: list[str], ldflags: list[str]) -> Any:
        from cffi import FFI

        ffi = FFI()
        ffi.cdef(declarations(self.native / self._cdef))
        ffi.set_source(
            f"{self.package}._native",
            f'#include "{self._cdef}"\n',
            sources=[str(path) for path in sorted(self.native.glob("*.c"))],
            include_dirs=[str(INCLUDE), str(self.native)],
            extra_compile_args=[*self._cflags, *cflags],
            extra_link_args=["-pthread", *ldflags],
            libraries=list(self._libraries),
            py_limited_api=True,
        )
        return ffi

    def _fingerprint(self, cflags: list[str], ldflags: list[str]) -> str:
        """Name everything that could change the binary, so that an unchanged tree is not compiled again.

        pip runs the hook twice for one editable install (once for the metadata, once for the wheel).
        """
        digest = hashlib.sha256()
        environment = [os.environ.get(name, "") for name in ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS")]
        for word in (sys.version, sysconfig.get_platform(), str(self.root), *environment, *cflags, "|", *ldflags):
            digest.update(word.encode() + b"\0")
        inputs = {path for pattern in ("*.c", "*.h", "*.py") for path in self.native.rglob(pattern)}
        for path in [self.root / "hatch_build.py", Path(__file__), *sorted(inputs), *sorted(INCLUDE.rglob("*.h"))]:
            digest.update(path.name.encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def _forget_old(self) -> None:
        builds = [path for path in self.cache.iterdir() if not path.name.startswith("tmp-") and path.is_dir()]
        for old in sorted(builds, key=lambda path: path.stat().st_mtime, reverse=True)[_KEPT:]:
            shutil.rmtree(old, ignore_errors=True)


def _finds(header: str, cflags: list[str]) -> bool:
    """Whether there is a compiler, and it finds this header."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    flags = [*shlex.split(os.environ.get("CPPFLAGS", "")), *shlex.split(os.environ.get("CFLAGS", "")), *cflags]
    try:
        tried = subprocess.run(
            [*compiler[:1], *flags, "-E", "-x", "c", "-"],
            input=f"#include <{header}>\n".encode(),
            capture_output=True,
            check=False,
        )
    except OSError:
        return False
    return tried.returncode == 0
