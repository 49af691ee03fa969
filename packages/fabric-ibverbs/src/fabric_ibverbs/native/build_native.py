"""What goes into `fabric_ibverbs._native`: declarations for cffi, sources, flags. Used by `hatch_build.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cffi import FFI

HERE = Path(__file__).resolve().parent
CFLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]


def ffibuilder(include: Path, extra_cflags: list[str], extra_ldflags: list[str]) -> FFI:
    """Return the FFI object, ready to compile. `include` holds fabric/domain.h. All paths are absolute."""
    from cffi import FFI

    marked = re.search(r"/\* cdef-begin \*/(.*)/\* cdef-end \*/", (HERE / "cdef_verbs.h").read_text(), re.DOTALL)
    if marked is None:
        raise ValueError("cdef_verbs.h has no marks")
    ffi = FFI()
    ffi.cdef(re.sub(r"/\*.*?\*/", "", marked.group(1), flags=re.DOTALL))
    ffi.set_source(
        "fabric_ibverbs._native",
        '#include "cdef_verbs.h"\n',
        sources=[str(path) for path in sorted(HERE.glob("*.c"))],
        include_dirs=[str(include), str(HERE)],
        extra_compile_args=[*CFLAGS, *extra_cflags],
        extra_link_args=["-pthread", *extra_ldflags],
        libraries=["dl"],
        py_limited_api=True,
    )
    return ffi
