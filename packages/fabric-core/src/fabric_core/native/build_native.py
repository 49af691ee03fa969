"""What goes into `fabric_core._native`: declarations for cffi, sources, flags.

Used by `hatch_build.py` (which decides when to compile) and by the Makefile's C tests:
`python build_native.py --print-sources` prints the sources that need no Python.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cffi import FFI

HERE = Path(__file__).resolve().parent
ENGINE_SOURCES = sorted(path for path in HERE.glob("*.c") if path.name != "door.c")
# A folder NAME holds a part of its own: NAME/*.c, and NAME/cdef_NAME.h with what Python may call of it.
PARTS = sorted(path for path in HERE.iterdir() if (path / f"cdef_{path.name}.h").is_file())
PLAIN_SOURCES = [*ENGINE_SOURCES, *(source for part in PARTS for source in sorted(part.glob("*.c")))]
SOURCES = [*PLAIN_SOURCES, HERE / "door.c"]
INCLUDE = [HERE / "include", HERE]
CFLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]

# The functions of a domain written in Python: callbacks that shim.py defines, and the table made of them.
SHIM_FUNCTIONS = """
    int fab_py_caps(void *ctx, fab_domain_caps *out);
    int fab_py_address(void *ctx, char *buf, size_t cap);
    int fab_py_mr_reg(void *ctx, const fab_mr *mr, fab_mr_keys *out);
    int fab_py_mr_dereg(void *ctx, uint64_t local_key);
    int fab_py_peer_open(void *ctx, const char *addr, size_t len, uint32_t *peer);
    int fab_py_peer_close(void *ctx, uint32_t peer);
    int fab_py_post(void *ctx, uint32_t peer, const fab_wr *wr, uint32_t n);
    int fab_py_post_recv(void *ctx, uint64_t id, uint64_t addr, uint64_t len);
    int fab_py_poll(void *ctx, fab_wc *wc, uint32_t cap, uint64_t now_ns);
    int fab_py_cancel(void *ctx, uint64_t id);
    int fab_py_wait_fd(void *ctx);
    int fab_py_arm(void *ctx, int on);
    void fab_py_close(void *ctx);
    int fab_py_counters(void *ctx, fab_counter *out, uint32_t cap);
"""
SHIM_NAMES = re.findall(r"fab_py_(\w+)\(", SHIM_FUNCTIONS)
SHIM_CDEF = f'extern "Python" {{{SHIM_FUNCTIONS}}}\nconst fab_domain_ops *fab_py_ops(void);\n'


def shim_source() -> str:
    """Return the C that makes a table of cffi's callbacks, which cffi defines as static functions further down."""
    forward = re.sub(r"^ +", "static ", SHIM_FUNCTIONS, flags=re.MULTILINE)
    fields = "".join(f"    .{name} = fab_py_{name},\n" for name in SHIM_NAMES)
    return f"""{forward}
static const fab_domain_ops *fab_py_ops(void) {{
    static const fab_domain_ops table = {{
    .abi_version = FAB_ABI_VERSION, .struct_size = sizeof(fab_domain_ops),
{fields}    }};
    return &table;
}}
"""


HEADERS = ["fabric/domain.h", "fabric/engine.h", *(f"{part.name}/cdef_{part.name}.h" for part in PARTS), "door.h"]
PREAMBLE = "".join(f'#include "{header}"\n' for header in HEADERS)


def ffibuilder(declarations: Callable[[Path], str], cflags: list[str], ldflags: list[str]) -> FFI:
    """Return the FFI object, ready to compile. All paths are absolute: cffi changes directory.

    `declarations`: what turns a header into what cffi reads (`fabric_core.extension` has it).
    """
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(declarations(HERE / "include" / "fabric" / "domain.h"))
    ffi.cdef(declarations(HERE / "include" / "fabric" / "engine.h"))
    for part in PARTS:
        ffi.cdef(declarations(part / f"cdef_{part.name}.h"))
    ffi.cdef(declarations(HERE / "door.h"))
    ffi.cdef(SHIM_CDEF)
    ffi.set_source(
        "fabric_core._native",
        PREAMBLE + shim_source(),
        sources=[str(path) for path in SOURCES],
        include_dirs=[str(path) for path in INCLUDE],
        extra_compile_args=[*CFLAGS, *cflags],
        extra_link_args=["-pthread", *ldflags],
        py_limited_api=True,
    )
    return ffi


if __name__ == "__main__":
    if sys.argv[1:] == ["--print-sources"]:
        print(*PLAIN_SOURCES)
    else:
        sys.exit(f"usage: {sys.argv[0]} --print-sources")
