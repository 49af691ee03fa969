"""Long-lived helpers of an engine: receive pools and watchers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fabric_core.errors import StaleHandle
from fabric_core.native_lib import fast, lib

if TYPE_CHECKING:
    from fabric_core.base import EngineBase

__all__ = ["RecvPool", "UvmWatcher"]


class RecvPool:
    """Receive buffers that rotate: a buffer is posted again after its message's callback has returned."""

    def __init__(self, engine: EngineBase, number: int, length: int, count: int) -> None:
        self._engine = engine
        self._number = number
        self.length = length  #: bytes of the longest message it takes
        self.count = count
        self.closed = False

    def close(self) -> None:
        """Take no further messages. Idempotent.

        Buffers already at the NIC still take one message each: it goes to another open pool, or is reported to
        `engine.on_error` as dropped.
        """
        if not self.closed:
            self.closed = True
            self._engine._callbacks.drop_pool(self._number)
            lib.fab_recvs_close(self._engine._core.pointer, 0, self._number)

    def __repr__(self) -> str:
        return f"RecvPool({self.count} x {self.length} bytes{', closed' if self.closed else ''})"


class UvmWatcher:
    """A 64-bit word that somebody bumps, and a callback that hears of it. Several steps may be heard as one."""

    def __init__(self, engine: EngineBase, number: int, ptr: int, own: int = 0) -> None:
        self._engine = engine
        self._core = engine._core  # the word lives in the C engine's memory
        self._number = number
        self._own = own  # a word that GPUs reach, to be given back when nobody can name it any more
        self.ptr = ptr  #: address of the u64
        self.closed = False

    @property
    def value(self) -> int:
        """The word, read with acquire, written with release. Raises StaleHandle once closed: it is watched no more."""
        if self.closed:
            raise StaleHandle("this watcher is closed")
        word: int = fast.load_u64(self.ptr)
        return word

    @value.setter
    def value(self, new: int) -> None:
        if self.closed:
            raise StaleHandle("this watcher is closed")
        fast.store_u64(self.ptr, new)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if not self.closed:
            self.closed = True
            self._engine._callbacks.drop_watcher(self._number)
            lib.fab_watch_close(self._core.pointer, self._number)

    def __del__(self) -> None:
        if getattr(self, "_own", 0) and self._core.address and self._core.pid == os.getpid():
            self.close()
            lib.fab_watch_settle(self._core.pointer)  # the watcher's thread looks at it no more
            lib.fab_cuda_word_free(self._own)
