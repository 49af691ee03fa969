"""The compiled engine as Python sees it: `ffi` and `lib` for set-up and blocking waits, `fast` for the short hot calls.

There are two doors into C, for one reason: the GIL. A cffi call drops it, and in a process with another busy Python
thread may wait 5 ms to get it back; so submits, polls and flag reads are METH_FASTCALL functions of the same module,
which keep it and never block (`native/door.c`). Whatever may wait goes through cffi, which must drop it.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

try:
    from fabric_core._native import ffi, lib
except ImportError as error:  # a source tree whose extension was not built, or a wheel of another platform
    raise ImportError(
        f"fabric_core._native cannot be loaded ({error}). In a source tree run `make native`; "
        "else reinstall fabric-core for this Python and machine."
    ) from error

__all__ = ["fast", "ffi", "lib", "text"]


def _doors() -> SimpleNamespace:
    functions: dict[str, Any] = {}
    for i in range(lib.fab_door_size()):
        address = int(ffi.cast("intptr_t", lib.fab_door(i)))
        functions[ffi.string(lib.fab_door_name(i)).decode()] = ctypes.cast(address, ctypes.py_object).value
    return SimpleNamespace(**functions)


fast = _doors()


def text(buffer: Any) -> str:
    """Return a C string as str, whatever bytes it holds."""
    return bytes(ffi.string(buffer)).decode(errors="replace")
