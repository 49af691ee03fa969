"""The thread in C that sends for a rank on a GPU, as one generation of it sees it."""

from __future__ import annotations

import atexit
import errno
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from fabric_core import BackendError, BadRange, EngineClosed, FabricError, ProtocolError, Unsupported
from fabric_core import native_api as engine_table
from fabric_moe import kernels

__all__ = ["KINDS", "NicProxy", "needs_c"]

KINDS = 3  #: immediates of a rank for each slot: counts, rows, sums
_PROXIES: weakref.WeakSet[NicProxy] = weakref.WeakSet()
_USED: dict[int, Any] = {}  # what the thread in C uses, by proxy: the collector may take a group and its engine at once


def needs_c() -> Any:
    """Return the C part. Raises Unsupported where fabric-moe was built without it."""
    if kernels.NATIVE is None:
        raise Unsupported(
            "fabric-moe was built without its C part, which sends tokens that lie on a GPU: install a wheel of it, or "
            "a C compiler before it is built; host memory needs neither"
        )
    return kernels.NATIVE


class NicProxy:
    """What a rank sends in one generation, from the meeting on. Called by the group's thread."""

    def __init__(
        self, shape: dict[str, int], control: Sequence[int], data: Sequence[int], theirs: Any, ours: Any,
        lifelines: Sequence[int], used: Any = (),
    ) -> None:  # fmt: skip
        """shape: `moe_gpu_shape`. control, data, lifelines: [R] numbers in C. theirs: [R, depth, KINDS] immediates.

        used: engine and memory, which are kept until `free`. Raises BackendError.
        """
        native = needs_c()
        self._lib, self._ffi, self._pid = native.lib, native.ffi, os.getpid()
        self._rank, self._topk = shape["rank"], shape["topk"]
        lists = [np.array(each, np.uint64) for each in (control, data, lifelines)]
        words = [np.ascontiguousarray(each, np.uint32) for each in (theirs, ours)]
        made = self._lib.moe_gpu_new(
            self._ffi.new("moe_gpu_shape *", {"api": engine_table(), **shape}),
            kernels.pointer(lists[0], "uint64_t"), kernels.pointer(lists[1], "uint64_t"),
            kernels.pointer(words[0], "uint32_t"), kernels.pointer(words[1], "uint32_t"),
            kernels.pointer(lists[2], "uint64_t"),
        )  # fmt: skip
        self._gpu = made
        if made == self._ffi.NULL:
            raise BackendError(f"rank {self._rank}: no memory for the proxy, no thread for it, or another fabric-core")
        _USED[id(self)] = used
        _PROXIES.add(self)

    def _usable(self) -> bool:
        return self._gpu != self._ffi.NULL and self._pid == os.getpid()  # a fork's child has no part in it

    def error(self) -> FabricError | None:
        """Return what this rank itself could not send, or was sent and cannot be."""
        if not self._usable():
            return None
        of = self._ffi.new("uint64_t *")
        rc = int(self._lib.moe_gpu_error(self._gpu, of))
        ranks = [r for r in range(64) if int(of[0]) >> r & 1]
        if not rc:
            return None
        if rc == -errno.EOVERFLOW:
            return BadRange(
                f"ranks {ranks} would get more rows in one step than shared_rows has room for: raise it on all ranks, "
                "or lower max_tokens. The group takes no further step"
            )
        if rc == -errno.EPROTO:
            return ProtocolError(
                f"counts of ranks {ranks} are not of this step of rank {self._rank}: do all ranks make the same calls "
                "in the same order?"
            )
        if rc == -errno.EBADMSG:
            return ProtocolError(f"counts of ranks {ranks} are none that a rank of this shape can have")
        if rc == -errno.ESHUTDOWN:
            return EngineClosed(f"rank {self._rank}: its tokens cannot be sent: the engine is closed")
        return BackendError(f"rank {self._rank}: its tokens cannot be sent: {os.strerror(-rc)}")

    def finish(self, seconds: float) -> bool:
        """Wait until what is owed to others has left, at most so long. Returns whether all has."""
        return not self._usable() or not self._lib.moe_gpu_finish(self._gpu, int(seconds * 1e9))

    def note(self, rank: int) -> None:
        """Tell all others that a rank leaves, or is given up, unless they were told of one already."""
        if self._usable():
            self._lib.moe_gpu_note(self._gpu, 1 << rank)

    def free(self) -> None:
        """Send nothing more. Idempotent; before the immediates are freed."""
        if self._usable():
            self._lib.moe_gpu_free(self._gpu)
        self._gpu = self._ffi.NULL
        _USED.pop(id(self), None)

    def __del__(self) -> None:
        if hasattr(self, "_gpu"):
            self.free()


@atexit.register
def _free_all() -> None:
    """At exit, before fabric_core closes the engines that are left: hooks run in turn, the last one first."""
    for proxy in list(_PROXIES):
        proxy.free()
