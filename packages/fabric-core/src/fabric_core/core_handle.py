"""What keeps the C engine's memory alive: everything that holds one of its handles holds this."""

from __future__ import annotations

import os
import weakref
from typing import Any

from fabric_core.native_lib import ffi, lib

__all__ = ["Core", "Remote"]


class Core:
    """Owns the C engine's memory. Everything that holds a handle holds this, so a late use is an error, not a crash."""

    __slots__ = ("__weakref__", "address", "pid", "pointer")

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self.address = int(ffi.cast("uintptr_t", pointer))
        self.pid = os.getpid()

    def __del__(self) -> None:
        pointer, self.pointer, self.address = self.pointer, ffi.NULL, 0  # the collector may come to its users after us
        if self.pid == os.getpid():  # after fork, the threads behind it are the parent's
            lib.fab_engine_free(pointer)


class Remote:
    """A descriptor's form in one C engine; dropped with the descriptor, when the last transfer to it has ended."""

    __slots__ = ("_core", "handle")

    def __init__(self, core: Core, handle: int) -> None:
        self._core = weakref.ref(core)  # a descriptor does not keep engines alive
        self.handle = handle

    def __del__(self) -> None:
        core = self._core()
        if core is not None:
            lib.fab_remote_drop(core.pointer, self.handle)
