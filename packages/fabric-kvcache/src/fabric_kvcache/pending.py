"""A decoder's request under way: what it waits for, how it ends, and what becomes of its pages.

    greeting -> seals -> data -> ended             and, when it ended badly:  quarantined -> settled

It waits for the seals of all its prefill ranks, whose sum says how many writes there are, and then for that many. Each
step is taken by whoever sees it first, the waiting thread or the callback thread. No lock is held while another part is
called.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from fabric_core import (
    Cancelled,
    EngineClosed,
    Expectation,
    FabricError,
    PeerLost,
    StaleHandle,
    TransferError,
    WaitTimeout,
)
from fabric_kvcache.asking import begin
from fabric_kvcache.errors import KvDamaged, PrefillRefused
from fabric_kvcache.pool import PageLease
from fabric_kvcache.protocol import Ended
from fabric_kvcache.received import ReceivedKv
from fabric_kvcache.request import Request
from fabric_kvcache.words import explained, missing_of

if TYPE_CHECKING:
    from fabric_kvcache.decoder import Decoder
    from fabric_kvcache.ranks import PrefillRank

__all__ = ["KvDamaged", "PendingKv", "PrefillRefused"]

log = logging.getLogger("fabric.kvcache")

_GRACE = 5.0  # seconds: how much longer than its deadline a request may take to say so


class PendingKv:
    """A request under way. Wait for it, or await it; either gives the `ReceivedKv` or raises what went wrong.

    PrefillRefused, PeerLost, DeadlineExceeded (naming what is missing), Cancelled, KvDamaged.

    It ends once. If it ends badly its pages are not free at that moment: `settled` tells when no write can land in them
    any more.
    """

    def __init__(
        self,
        decoder: Decoder,
        ranks: Sequence[PrefillRank],
        request: Request,
        lease: PageLease,
        slot: int,
        imms: tuple[int, int],
    ) -> None:
        self.request = request
        self.prefillers = [rank.given for rank in ranks]
        self.deadline = time.monotonic() + request.timeout
        self.writes = 0  #: how many raise the immediate; known when all seals are there
        self.nbytes = 0  #: of those
        self._decoder = decoder
        self._ranks = list(ranks)
        self._lease = lease
        self._slot = slot
        self._imm, self._seal_imm = imms
        self._lock = threading.Lock()  # guards what follows
        self._phase = "greeting"
        self._op: Expectation | None = None
        self._unready = len(self._ranks)
        self._sources: list[PrefillRank] = []  # whom this request was sent to, in the order of their seals
        self._open: set[PrefillRank] = set()  # of those: who may still write
        self._gone: FabricError | None = None  # why one of them writes no more: what has not arrived never will
        self._error: FabricError | None = None
        self._result: ReceivedKv | None = None
        self._done_calls: list[Callable[[PendingKv], object]] = []
        self._settled_calls: list[Callable[[PendingKv], object]] = []
        self._moved = threading.Event()  # it has left the greeting
        self._done = threading.Event()
        self._settled = threading.Event()
        self._checking = threading.Lock()  # one thread looks through the pages

    # ---- looking and waiting

    @property
    def done(self) -> bool:
        """Whether it has ended, well or badly. Polls, and so helps the engine along."""
        op = self._op
        if op is not None and op.done:
            self._advance(op)
        return self._done.is_set()

    @property
    def settled(self) -> bool:
        """Whether no write of this request can land any more: its pages may be used again (or hold its KV)."""
        return self._settled.is_set()

    def wait(self, timeout: float | None = None) -> ReceivedKv:
        """Block until everything has arrived. None: as long as the request's own timeout. Raises WaitTimeout too."""
        limit = time.monotonic() + timeout if timeout is not None else self.deadline + _GRACE
        while not self._done.is_set():
            left = limit - time.monotonic()
            if left <= 0:
                raise WaitTimeout(f"request {self.request.request_id} goes on: wait again, or cancel() it")
            op = self._op
            if op is None:
                self._moved.wait(left)
                continue
            try:
                op.wait(left)
            except (WaitTimeout, TransferError):
                pass
            self._advance(op)
        return self._outcome()

    def wait_settled(self, timeout: float) -> bool:
        """Block until its pages are safe; False: they are not, within `timeout` seconds."""
        return self._settled.wait(timeout)

    def __await__(self) -> Generator[Any, None, ReceivedKv]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def ended(_: PendingKv) -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the loop is closed: nobody waits any more
                pass

        self.add_done_callback(ended)
        yield from future.__await__()
        return self._outcome()

    def add_done_callback(self, call: Callable[[PendingKv], object]) -> None:
        """Call `call(self)` when it ends (callback thread, or the one that saw it first); at once if it has."""
        self._add(self._done, self._done_calls, call)

    def add_settled_callback(self, call: Callable[[PendingKv], object]) -> None:
        """Call `call(self)` when its pages are safe."""
        self._add(self._settled, self._settled_calls, call)

    def _add(self, event: threading.Event, calls: list[Any], call: Callable[[PendingKv], object]) -> None:
        with self._lock:
            if not event.is_set():
                calls.append(call)
                return
        call(self)

    def cancel(self) -> None:
        """End it. The prefillers are asked to stop, and the pages come back when they have: see `settled`."""
        self._fail(Cancelled("the request was cancelled", op="prefill", code="ECANCELED"))

    # ---- steps

    def _ready(self) -> None:
        """A handshake has ended; with the last one the request is sent."""
        with self._lock:
            self._unready -= 1
            if self._unready or self._phase != "greeting":
                return
        try:
            begin(self._decoder, self)
        except FabricError as error:
            self._fail(error)

    def _begun(self, sources: list[PrefillRank]) -> bool:
        """The request is about to be sent to these. False: it has ended meanwhile."""
        with self._lock:
            if self._phase != "greeting":
                return False
            self._phase = "seals"
            self._sources = sources
            self._open = set(sources)
        self._expect("seals", self._seal_imm, len(sources))
        return True

    def _expect(self, phase: str, imm: int, count: int) -> None:
        left = max(0.0, self.deadline - time.monotonic())
        try:
            op = self._decoder.engine.expect_imm_count(imm, count, timeout=left)
        except FabricError as error:
            self._fail(error)
            return
        with self._lock:
            if self._phase != phase:
                return  # it has ended, and its immediates with it
            self._op = op
            self._moved.set()
        op.add_done_callback(self._advance)
        self._give_up()

    def _advance(self, op: Expectation) -> None:
        """Take the next step if this one is done. Any thread, any number of times."""
        with self._lock:
            if op is not self._op or not op.done:
                return
            phase, self._op = self._phase, None
            self._moved.clear()
            if phase == "seals":
                self._phase = "data"
        error = op.exception()
        if error is not None:
            self._fail(error)
        elif phase == "data":
            self._arrived()
        else:
            self._count()

    def _count(self) -> None:
        """All seals are here: now the number of writes is known."""
        seals = self._decoder._seals(self)
        self.writes = sum(count for _epoch, count, _nbytes in seals)
        self.nbytes = sum(nbytes for _epoch, _count, nbytes in seals)
        wrong = [rank for rank, (epoch, *_) in zip(self._sources, seals, strict=True) if epoch != self.request.epoch]
        if wrong:
            self._fail(KvDamaged(f"the prefiller {wrong[0].address} sealed another request than {self.request.epoch}"))
            return
        self._expect("data", self._imm, self.writes)

    def _arrived(self) -> None:
        with self._lock:
            if self._phase == "ended":
                return
            self._phase = "ended"
        surplus, stray = self._free_imms()
        if surplus or stray:
            self._damaged(f"the immediate was raised {self.writes + surplus} times where {self.writes} were announced")
            return
        if not self._decoder.verify:
            self._close_sources()
        self._finish()

    def _close_sources(self) -> None:
        with self._lock:
            ended, self._open = self._open, set()
        for rank in ended:
            self._decoder.ranks.closed(rank, self.request.epoch)
        self._settle(release=False)

    def _unclaimed(self) -> None:
        """The decoder closes: what has arrived and was not looked at is looked at no more."""
        if self._done.is_set() and self._error is None:
            self._close_sources()

    def _outcome(self) -> ReceivedKv:
        """Return or raise how it ended. What has arrived is looked through first, once, by a thread that wants it."""
        with self._checking:
            if self._error is None and self._result is None:
                missing = missing_of(self) if self._decoder.verify else ""
                if missing:
                    self._damaged(missing)
                else:
                    if self._decoder.verify:
                        self._close_sources()
                    self._result = ReceivedKv(
                        self._decoder, self._lease, self._slot, self.request, self.writes, self.nbytes
                    )
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    # ---- bad ends

    def _fail(self, cause: FabricError) -> None:
        with self._lock:
            if self._phase == "ended":
                return
            phase, self._phase = self._phase, "ended"
            self._op = None
        self._free_imms()
        self._error = explained(self, cause, phase)
        self._stop()
        self._finish()

    def _damaged(self, what: str) -> None:
        peers = ", ".join(str(rank.address) for rank in self._sources)
        self._error = KvDamaged(f"all {self.writes} writes of {peers} were notified; {what}")
        self._stop()
        self._finish()

    def _stop(self) -> None:
        """Quarantine the pages, and ask everybody who may still write to stop."""
        with self._lock:
            still = list(self._open)
        if not still:
            self._settle(release=True)
            return
        self._lease.quarantine()
        for rank in still:
            self._decoder.ranks.cancel(rank, self.request.epoch)

    def _ended_at(self, rank: PrefillRank, message: Ended | None) -> None:
        """A prefill rank has nothing under way any more for this request. None: it is gone, or has lost its right."""
        with self._lock:
            self._open.discard(rank)
            last = not self._open
            ended = self._phase == "ended"
        if ended and last:
            self._settle(release=self._error is not None)
        elif not ended and message is not None:
            self._fail(PrefillRefused(message.reason, peer=str(rank.address), op="prefill"))
        elif not ended:
            self._lost(PeerLost("it is gone", peer=str(rank.address), op="prefill"))

    def _lost(self, error: FabricError) -> None:
        """A prefill rank writes no more. What it has written counts: it may have left as soon as all was there."""
        with self._lock:
            self._gone = self._gone or error
        self._give_up()

    def _give_up(self) -> None:
        """If a prefill rank is gone: take the steps that can still be taken, and fail at the first that cannot."""
        while True:
            with self._lock:
                op, gone = self._op, self._gone
            if op is None or gone is None:  # no op: whoever takes a step comes here after it
                return
            if not op.done:
                self._fail(gone)
                return
            self._advance(op)

    def _settle(self, *, release: bool) -> None:
        if release:
            self._decoder._give(self._lease, self._slot)
        with self._lock:
            if self._settled.is_set():
                return
            self._settled.set()
            calls, self._settled_calls = self._settled_calls, []
        self._decoder._forget(self)
        self._call(calls)

    def _finish(self) -> None:
        with self._lock:
            if self._done.is_set():
                return
            self._done.set()
            self._moved.set()
            calls, self._done_calls = self._done_calls, []
        self._call(calls)

    def _call(self, calls: list[Callable[[PendingKv], object]]) -> None:
        for call in calls:
            try:
                call(self)
            except Exception:
                log.exception("a callback of request %s failed", self.request.request_id)

    def _free_imms(self) -> tuple[int, int]:
        try:
            return self._decoder.engine.free_imm(self._imm), self._decoder.engine.free_imm(self._seal_imm)
        except (StaleHandle, EngineClosed):  # the engine was closed: its immediates are gone
            return 0, 0
