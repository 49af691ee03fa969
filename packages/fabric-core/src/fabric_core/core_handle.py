"""What keeps the C engine's memory alive: everything that holds one of its handles holds this."""

from __future__ import annotations

import os
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

    __slots__ = ("core", "group", "handle")

    def __init__(self, core: Core, group: int, handle: int) -> None:
        self.core = core
        self.group = group
        self.handle = handle

    def __del__(self) -> None:
        lib.fab_remote_drop(self.core.pointer, self.handle)
