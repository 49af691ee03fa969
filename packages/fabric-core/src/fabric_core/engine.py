"""TransferEngine: the paper's API (Fig. 2) over the C engine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from operator import index
from typing import Any

from fabric_core.errors import BackendError, BadRange, ConfigError, QueueFull, StaleHandle
from fabric_core.native_lib import fast, ffi, lib
from fabric_core.operations import Expectation
from fabric_core.pools import UvmWatcher
from fabric_core.submits import OnDone, Submits
from fabric_core.types import Flag, NetAddr

__all__ = ["TransferEngine"]

_NOT_IN_USE = "immediate {!r} is not in use here: not from alloc_imm() of this engine, or freed already"


class TransferEngine(Submits):
    """Moves memory between processes, point to point: writes with immediates, messages, expectations.

    Made by `open`. Safe to use from any number of threads. Everything that is submitted ends exactly once (C1), with an
    error that names the culprit if it ends badly, and within a deadline. A context manager.
    """

    # ---- immediates ------------------------------------------------------------------------------------------------

    def alloc_imm(self) -> int:
        """Return an immediate of ours, to be given to senders. Its arrivals count from now on (C3)."""
        self._check_open()
        imm = lib.fab_imm_alloc(self._core.pointer)
        if imm < 0:
            raise QueueFull(
                f"all {self.settings.imm_slots} immediates are in use: free_imm() some, or raise FABRIC_IMM_SLOTS"
            )
        return int(imm)

    def free_imm(self, imm: int) -> int:
        """Give an immediate back; returns the surplus: whole writes that arrived and no expectation claimed.

        Expectations that still wait on it end as cancelled. Later arrivals are counted as stray. Raises StaleHandle.
        """
        rc = lib.fab_imm_free(self._core.pointer, self._u32(imm))
        if rc < 0:
            raise StaleHandle(
                f"immediate {imm!r} is not in use here: not from alloc_imm() of this engine, or freed already"
            )
        return int(rc)

    def imm_count(self, imm: int) -> int:
        """Return how many whole writes have arrived and are not claimed. Polls, and so helps the engine along."""
        try:
            count: int = fast.imm_count(self._address, imm)
        except OverflowError:
            count = -1
        if count < 0:
            raise StaleHandle(
                f"immediate {imm!r} is not in use here: not from alloc_imm() of this engine, or freed already"
            )
        return count

    def expect_imm_count(
        self,
        imm: int,
        count: int,
        on_done: OnDone = None,
        *,
        timeout: float | None = None,
        peers: Iterable[NetAddr | str] = (),
    ) -> Expectation:
        """Wait for `count` arrivals of `imm`, counted since `alloc_imm` (C3); expectations claim their counts in order.

        Args:
            on_done: called with the Expectation on the callback thread.
            timeout: seconds until it fails with DeadlineExceeded; None: `settings.timeout`.
            peers: fail at once with PeerLost when one of these is lost.

        Raises:
            StaleHandle: no immediate of ours. BadRange: a negative or absurd count.
        """
        self._check_open()
        if isinstance(on_done, Flag):
            raise ConfigError("an expectation takes a callable or None; a Flag is bumped by transfers")
        if on_done is not None and not callable(on_done):
            raise TypeError(f"on_done is a callable or None, not {type(on_done).__name__}")
        count = index(count)
        if not 0 <= count <= 1 << 40:
            raise BadRange(f"count={count!r}: an expectation waits for 0 to 2**40 writes")
        seconds = self.settings.timeout if timeout is None else timeout
        if not seconds >= 0:
            raise BadRange(f"timeout={timeout!r}: a number of seconds, 0 or more")
        numbers = [self._peer(0, self._addr(a)) for a in peers]
        ns = 1 << 60 if math.isinf(seconds) else max(1, int(seconds * 1e9))
        args = (self._core.pointer, self._u32(imm), count, min(ns, 1 << 60), numbers, len(numbers))
        rc = lib.fab_expect(*args)
        if rc < 0:
            rc = self._again(
                rc,
                lambda: int(lib.fab_expect(*args)),
                lambda _: StaleHandle(_NOT_IN_USE.format(imm)),
            )
        expectation = Expectation(self, rc, imm, count)
        if on_done is not None:
            self._callbacks.add(expectation, on_done)
        return expectation

    @staticmethod
    def _u32(imm: int) -> int:
        number = index(imm)
        return number if 0 <= number < 1 << 32 else 0xFFFFFFFF

    # ---- the rest --------------------------------------------------------------------------------------------------

    def alloc_uvm_watcher(self, on_change: Callable[[int, int], object]) -> UvmWatcher:
        """Watch a fresh u64 in host memory: `on_change(old, new)` on the callback thread after it changed."""
        self._check_open()
        if not callable(on_change):
            raise ConfigError(f"on_change is called with (old, new); {on_change!r} cannot be called")
        word = ffi.new("uint64_t *")
        rc = lib.fab_watch_add(self._core.pointer, 0, ffi.NULL, ffi.NULL, word)
        if rc < 0:
            raise BackendError(f"a watcher cannot be made: {os.strerror(-rc)}")
        watcher = UvmWatcher(self, rc, word[0])
        self._callbacks.add_watcher(rc, on_change)
        return watcher

    def progress(self) -> int:
        """One step of every group, if nobody else is stepping it: returns how much happened. Never blocks."""
        did: int = fast.progress(self._address)
        return did

    def stats(self) -> dict[str, Any]:
        """Return counters since open: per engine, per group, and per peer and NIC. Cheap; reads while others count."""
        from fabric_core import stats

        return stats.collect(self)
