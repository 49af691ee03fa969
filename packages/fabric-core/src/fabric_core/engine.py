"""TransferEngine: the paper's API (Fig. 2) over the C engine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from operator import index
from typing import Any

from fabric_core import sequence, streams
from fabric_core.errors import BackendError, BadRange, ConfigError, QueueFull, StaleHandle
from fabric_core.gpu import served
from fabric_core.native_lib import fast, ffi, lib
from fabric_core.operations import Expectation
from fabric_core.pools import UvmWatcher
from fabric_core.sequence import PreparedSequence, StepWrite
from fabric_core.streams import Prepared
from fabric_core.submits import OnDone, Submits, flag_of
from fabric_core.types import Flag, MrDesc, MrHandle, NetAddr, Pages

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
            on_done: called with the Expectation on the callback thread, or a Flag to bump.
            timeout: seconds until it fails with DeadlineExceeded; None: `settings.timeout`.
            peers: fail at once with PeerLost when one of these is lost.

        Raises:
            StaleHandle: no immediate of ours. BadRange: a negative or absurd count.
        """
        self._check_open()
        flag = 0 if on_done is None else flag_of(on_done)
        count = index(count)
        if not 0 <= count <= 1 << 40:
            raise BadRange(f"count={count!r}: an expectation waits for 0 to 2**40 writes")
        seconds = self.settings.timeout if timeout is None else timeout
        if not seconds >= 0:
            raise BadRange(f"timeout={timeout!r}: a number of seconds, 0 or more")
        addrs = [self._addr(a) for a in peers]
        ns = 1 << 60 if math.isinf(seconds) else max(1, int(seconds * 1e9))

        def submit() -> int:
            numbers = [self._peer(0, a) for a in addrs]
            return int(
                lib.fab_expect(self._core.pointer, self._u32(imm), count, min(ns, 1 << 60), numbers, len(numbers))
            )

        rc = submit()
        if rc < 0:
            rc = self._again(rc, submit, lambda _: StaleHandle(_NOT_IN_USE.format(imm)))
        expectation = Expectation(self, rc, imm, count)
        if flag:
            lib.fab_expect_flag(self._core.pointer, rc, flag)
        elif on_done is not None:
            self._callbacks.add(expectation, on_done)  # type: ignore[arg-type]
        return expectation

    @staticmethod
    def _u32(imm: int) -> int:
        number = index(imm)
        return number if 0 <= number < 1 << 32 else 0xFFFFFFFF

    # ---- GPU streams -----------------------------------------------------------------------------------------------

    def gpu_flag(self, device: str | None = None) -> Flag:
        """Return a Flag that GPUs reach too: `stream_wait` waits for it. Raises Unsupported if no GPU is served."""
        return Flag(streams.gpu_of(self, device))

    def prepare_write(
        self,
        length: int,
        imm: int | None,
        src: tuple[MrHandle, int],
        dst: tuple[MrDesc, int],
        flag: Flag | None = None,
        *,
        nic: int | None = None,
        timeout: float | None = None,
        device: str | None = None,
    ) -> Prepared:
        """Prepare a write that a GPU stream starts, each time it gets to a `stream_submit`.

        Args are those of `submit_single_write`; `flag` (default: a fresh `gpu_flag`) is bumped at each end.
        Raises BadRange, StaleHandle, RemoteAccessError; Unsupported if the engine serves no GPU.
        """
        return streams.prepare(self, src, dst, length, imm, flag, nic, timeout, device)

    def prepare_paged_writes(
        self,
        page_length: int,
        imm: int | None,
        src: tuple[MrHandle, Pages],
        dst: tuple[MrDesc, Pages],
        flag: Flag | None = None,
        *,
        nic: int | None = None,
        timeout: float | None = None,
        device: str | None = None,
    ) -> Prepared:
        """The same for pages, as in `submit_paged_writes`. The page lists are copied."""
        return streams.prepare(self, src, dst, page_length, imm, flag, nic, timeout, device)

    def prepare_sequence(
        self,
        steps: Iterable[Iterable[StepWrite]],
        *,
        on_submitted: Callable[[], object] | None = None,
        device: str | None = None,
    ) -> PreparedSequence:
        """Prepare transfers for the steps that a word counts: step k submits the k-th list, in C, without Python.

        Whoever computes bumps the word at `sequence.ptr`: a thread of this process, a kernel, `stream_signal` with the
        number of finished steps, or `stream_submit`. A step may be empty; several that are seen at once are all
        submitted, in order.

        Args:
            steps: for each step the writes and pages that it submits. Page lists are copied; memory is held.
            on_submitted: called without arguments on the callback thread after the watcher's thread has submitted.
                Then each transfer is kept until `sequence.take`; without it they are only counted.
            device: the GPU that bumps the word; None: the engine's, if it serves one.

        Raises:
            BadRange, StaleHandle, RemoteAccessError, ConfigError: of the first write that cannot be; nothing was made.
        """
        return sequence.prepare(self, steps, on_submitted, device)

    def stream_submit(self, prepared: Prepared | PreparedSequence, stream: Any = None) -> None:
        """Have `stream` start a prepared transfer, after what is before it; also while it is captured into a graph.

        Of a sequence it is the next step.
        The stream goes on at once: to wait for the end, `stream_wait(prepared.flag, n, stream)`.
        """
        streams.add(prepared, stream)

    def stream_wait(self, flag: Flag, value: int = 1, stream: Any = None, *, device: str | None = None) -> None:
        """Have `stream` wait until `flag` has been bumped `value` times. Every operation ends (C1), so this does too.

        The stream goes on after a failure as well: `flag.failed` counts them. In a graph that is launched again, set
        the flag back first: `stream_signal(flag, 0, stream)`.
        """
        streams.wait(self, flag, value, stream, device)

    def stream_signal(
        self, what: UvmWatcher | Flag | PreparedSequence, value: int, stream: Any = None, *, device: str | None = None
    ) -> None:
        """Have `stream` set a watcher's, a flag's or a sequence's word to `value`, after what is before it there."""
        streams.write(self, what, value, stream, device)

    # ---- the rest --------------------------------------------------------------------------------------------------

    def alloc_uvm_watcher(self, on_change: Callable[[int, int], object]) -> UvmWatcher:
        """Watch a fresh u64 in host memory: `on_change(old, new)` on the callback thread after it changed.

        Where the engine serves a GPU, GPUs reach the word too, under the same address (`watcher.ptr`): by
        `stream_signal`, or a kernel's store or addition at system scope. Several changes may be heard as one.
        """
        self._check_open()
        if not callable(on_change):
            raise ConfigError(f"on_change is called with (old, new); {on_change!r} cannot be called")
        gpu = served(self.devices)
        own = lib.fab_cuda_word_new(gpu) if gpu is not None else 0
        if gpu is not None and not own:
            raise BackendError(f"a watcher cannot be made: no pinned host memory for cuda:{gpu}")
        word = ffi.new("uint64_t *")
        rc = lib.fab_watch_add(self._core.pointer, own, ffi.NULL, ffi.NULL, word)
        if rc < 0:
            lib.fab_cuda_word_free(own)
            raise BackendError(f"a watcher cannot be made: {os.strerror(-rc)}")
        watcher = UvmWatcher(self, rc, word[0], own)
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
