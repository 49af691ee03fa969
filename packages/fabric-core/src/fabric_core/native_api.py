"""For people who write C against the engine: where the headers are, and the table of functions."""

from __future__ import annotations

from pathlib import Path

__all__ = ["get_include", "native_api"]


def get_include() -> str:
    """Return the directory to give to the C compiler: it holds `fabric/domain.h` and `fabric/engine.h`."""
    return str(Path(__file__).parent / "native" / "include")


def native_api() -> int:
    """Return the address of the engine's `fab_native_table` (fabric/engine.h); check its version and struct_size.

    The first argument of each function is `engine.native_handle`.
    """
    from fabric_core.native_lib import ffi, lib

    return int(ffi.cast("uintptr_t", lib.fab_native_api()))
