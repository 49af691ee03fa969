"""What this machine can do at best, measured in the same run as the figure that stands beside it.

    stream   one core copies memory to memory, past the caches where that is faster: the roof of a mapped path
    cma      the kernel copies between address spaces with process_vm_writev: the roof for memory of the user's own

The compiled engine measures both without Python in the way. Where it does not offer that, ctypes calls the C library;
such a limit says so, and is only given for sizes where a call's overhead does not matter.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Limit", "cma", "stream"]

#: Below this a ctypes call (about 1 us) would be a visible part of the copy.
MIN_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class Limit:
    """A measured roof."""

    name: str  #: "stream" or "cma"
    bytes_per_s: float | None  #: None: not measured, see `how`
    how: str  #: "native", "ctypes", or why there is none


def stream(nbytes: int, slots: int, seconds: float = 0.1) -> Limit:
    """Copy `slots` pieces of `nbytes` in turn, for about `seconds` each way there is; the fastest is the roof."""
    plain = _memmove(nbytes, slots, seconds)
    native = _native("fab_limit_stream")
    if native is None:
        return plain
    best = float(native(nbytes * slots, seconds))
    return plain if (plain.bytes_per_s or 0.0) > best else Limit("stream", best, "native")


def _memmove(nbytes: int, slots: int, seconds: float) -> Limit:
    if nbytes < MIN_BYTES:
        return Limit("stream", None, f"not measured below {MIN_BYTES} bytes")
    source, target = _touched(nbytes * slots), _touched(nbytes * slots)
    a, b = _address(source), _address(target)

    def copy(i: int) -> None:
        offset = i % slots * nbytes
        ctypes.memmove(b + offset, a + offset, nbytes)

    return Limit("stream", _time(copy, nbytes, seconds), "ctypes memmove")


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def cma(nbytes: int, slots: int, seconds: float = 0.1) -> Limit:
    """The same through the kernel, into this very process: needs no permission, costs what a peer costs."""
    native = _native("fab_limit_cma")
    if native is not None:
        return Limit("cma", float(native(nbytes * slots, seconds)), "native")
    if nbytes < MIN_BYTES:
        return Limit("cma", None, f"not measured below {MIN_BYTES} bytes")
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        write = libc.process_vm_writev
    except AttributeError:
        return Limit("cma", None, "this C library has no process_vm_writev")
    write.restype = ctypes.c_ssize_t
    write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    source, target = _touched(nbytes * slots), _touched(nbytes * slots)
    a, b, pid = _address(source), _address(target), os.getpid()
    local, remote = _Iovec(a, nbytes), _Iovec(b, nbytes)
    if write(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) != nbytes:
        return Limit("cma", None, f"process_vm_writev is refused: {os.strerror(ctypes.get_errno())}")

    def copy(i: int) -> None:
        offset = i % slots * nbytes
        local.base, remote.base = a + offset, b + offset
        write(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)

    return Limit("cma", _time(copy, nbytes, seconds), "ctypes process_vm_writev")


def _native(name: str) -> Callable[..., Any] | None:
    try:
        found: Callable[..., Any] | None = getattr(importlib.import_module("fabric_core._native").lib, name, None)
    except (ImportError, AttributeError):
        return None
    return found


def _touched(nbytes: int) -> mmap.mmap:
    """Anonymous memory whose pages are there: a first touch costs more than the copy."""
    memory = mmap.mmap(-1, nbytes)
    for offset in range(0, nbytes, mmap.PAGESIZE):
        memory[offset] = 1
    return memory


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _time(copy: Callable[[int], None], nbytes: int, seconds: float) -> float:
    begin = time.perf_counter()
    count, elapsed = 0, 0.0
    while elapsed < seconds or count < 3:
        copy(count)
        count += 1
        elapsed = time.perf_counter() - begin
    return count * nbytes / elapsed
