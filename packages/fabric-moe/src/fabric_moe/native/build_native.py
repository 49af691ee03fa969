"""What goes into `fabric_moe._native`: declarations for cffi, sources, flags. Used by `hatch_build.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cffi import FFI

HERE = Path(__file__).resolve().parent
# -O3 vectorises the loops; contraction off: see rows.c
CFLAGS = [
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wconversion",
    "-fvisibility=hidden",
]


def ffibuilder(extra_cflags: list[str], extra_ldflags: list[str]) -> FFI:
    """Return the FFI object, ready to compile. All paths are absolute."""
    from cffi import FFI

    marked = re.search(r"/\* cdef-begin \*/(.*)/\* cdef-end \*/", (HERE / "cdef_moe.h").read_text(), re.DOTALL)
    if marked is None:
        raise ValueError("cdef_moe.h has no marks")
    ffi = FFI()
    ffi.cdef(re.sub(r"/\*.*?\*/", "", marked.group(1), flags=re.DOTALL))
    ffi.set_source(
        "fabric_moe._native",
        '#include "cdef_moe.h"\n',
        sources=[str(path) for path in sorted(HERE.glob("*.c"))],
        include_dirs=[str(HERE)],
        extra_compile_args=[*CFLAGS, *extra_cflags],
        extra_link_args=extra_ldflags,
        py_limited_api=True,
    )
    return ffi
