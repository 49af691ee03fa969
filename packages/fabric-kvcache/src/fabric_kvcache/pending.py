"""A decoder's request under way: what it waits for, how it ends, and what becomes of its pages.

    greeting -> seals -> data -> ended             and, when it ended badly:  quarantined -> settled

It waits for the seals of all its prefill ranks, whose sum says how many writes there are, and then for that many. Each
step is taken by whoever sees it first, the waiting thread or the callback thread. No lock is held while another part is
called.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
from fabric_kvcache.arguments import LONGEST_SLEEP, seconds
from fabric_kvcache.asking import again, begin
from fabric_kvcache.errors import KvDamaged, PrefillRefused
from fabric_kvcache.outcome import Outcome
from fabric_kvcache.pool import PageLease
from fabric_kvcache.protocol import Ended
from fabric_kvcache.received import ReceivedKv
from fabric_kvcache.request import Request
from fabric_kvcache.words import explained, missing_of

if TYPE_CHECKING:
    from fabric_kvcache.decoder import Decoder
    from fabric_kvcache.ranks import PrefillRank

__all__ = ["KvDamaged", "PendingKv", "PrefillRefused"]

_GRACE = 5.0  # seconds: how much longer than its deadline a request may take to say so


class PendingKv(Outcome):
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
        super().__init__(request.request_id)
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
        self._greeted_again: set[PrefillRank] = set()  # those that did not know this decoder any more
        self._dropped = False  # cancelled; what has arrived is wanted no more
        self._result: ReceivedKv | None = None
        self._moved = threading.Event()  # it has left the greeting
        self._checking = threading.Lock()  # one thread looks through the pages

    # ---- looking and waiting

    @property
    def done(self) -> bool:
        """Whether it has ended, well or badly. Polls, and so helps the engine along."""
        op = self._op
        if op is not None and op.done:
            self._advance(op)
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> ReceivedKv:
        """Block until everything has arrived. None: as long as the request's own timeout. Raises WaitTimeout too."""
        limit = self.deadline + _GRACE if timeout is None else time.monotonic() + seconds("timeout", timeout)
        while not self._done.is_set():
            left = limit - time.monotonic()
            if left <= 0:
                raise WaitTimeout(f"request {self.request.request_id} goes on: wait again, or cancel() it")
            op, left = self._op, min(left, LONGEST_SLEEP)
            if op is None:
                self._moved.wait(left)
                continue
            try:
                op.wait(left)
            except (WaitTimeout, TransferError):
                pass
            self._advance(op)
        return self._outcome()

    def cancel(self) -> None:
        """End it. The prefillers are asked to stop, and the pages come back when they have: see `settled`.

        What has arrived, and was not taken by `wait` or `await`, is given back too; a `ReceivedKv` is the caller's.
        """
        error = self._cancelled()
        self._fail(error)
        if self._error is not error:
            self._dropped = True
            if self._done.is_set():  # else whoever ends it comes to _drop()
                self._drop()

    def _cancelled(self) -> Cancelled:
        cure = "ask again, under another request id, if its KV is wanted after all"
        return Cancelled("the request was cancelled", op="prefill", code="ECANCELED", cure=cure)

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
        if self._dropped:
            self._drop()

    def _drop(self) -> None:
        """It has arrived, and nobody wants it: as if it had been cancelled before."""
        with self._checking:
            if self._error is not None or self._result is not None:
                return
            self._error = self._cancelled()
        self._stop()

    def _close_sources(self) -> None:
        with self._lock:
            ended, self._open = self._open, set()
        for rank in ended:
            self._decoder.ranks.closed(rank, self.request.epoch)
        self._settle(release=False)

    def _outcome(self) -> ReceivedKv:
        """Return or raise how it ended. What has arrived is looked through first, once, by a thread that wants it."""
        verify = self._decoder.verify
        with self._checking:
            first = self._error is None and self._result is None
            if first:
                missing = missing_of(self) if verify else ""
                if missing:
                    self._error = self._damage(missing)
                else:
                    self._result = ReceivedKv(
                        self._decoder, self._lease, self._slot, self.request, self.writes, self.nbytes
                    )
        if first and self._error is not None:  # not above: callbacks may wait for it too
            self._stop()
        elif first and verify:
            self._close_sources()
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
        self._error = self._damage(what)
        self._stop()
        self._finish()

    def _damage(self, what: str) -> KvDamaged:
        peers = ", ".join(str(rank.address) for rank in self._sources)
        return KvDamaged(f"all {self.writes} writes of {peers} were notified; {what}")

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

    def _ended_at(self, rank: PrefillRank, message: Ended | None, gone: FabricError | None = None) -> None:
        """A prefill rank has nothing under way any more for this request.

        `message`: what it says itself; None: it is `gone`, or has lost its right to write.
        """
        with self._lock:
            self._open.discard(rank)
            ended = self._phase == "ended"
            # Without an error it has arrived, or whoever ends it is still looking at its pages, and settles it then.
            settles = ended and not self._open and self._error is not None
        if settles:
            self._settle(release=True)
        elif not ended and message is not None:
            self._fail(PrefillRefused(message.reason, peer=str(rank.address), op="prefill"))
        elif not ended:
            self._lost(gone or PeerLost("it is gone", peer=str(rank.address), op="prefill"))

    # ---- a prefill rank that does not know this decoder any more

    def _greet_again(self, rank: PrefillRank) -> bool:
        """It has nothing of the request: greet and ask it anew, once. False: that was done, or is no use."""
        with self._lock:
            if self._phase != "seals" or rank not in self._open or rank in self._greeted_again:
                return False
            self._open.discard(rank)
        try:
            new = self._decoder.ranks.get(rank.given)
        except FabricError as error:
            self._fail(error)
            return True
        self._greeted_again.add(new)
        self._decoder.ranks.greeting_ends(new, max(0.0, self.deadline - time.monotonic()))
        self._decoder.ranks.when_ready(new, lambda: self._ask_again(rank, new))
        return True

    def _ask_again(self, old: PrefillRank, new: PrefillRank) -> None:
        try:
            again(self._decoder, self, old, new)
        except FabricError as error:
            self._fail(error)

    def _replaced(self, old: PrefillRank, new: PrefillRank) -> bool:
        """From now on the new one may write, in the place of the old one. False: the request has ended meanwhile."""
        with self._lock:
            if self._phase != "seals":
                return False
            self._sources[self._sources.index(old)] = new
            self._open.add(new)
            return True

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
        self._decoder._forget(self)
        self._moved.set()
        self._tell_settled()

    def _finish(self) -> None:
        self._moved.set()
        self._tell_done()

    def _free_imms(self) -> tuple[int, int]:
        try:
            return self._decoder.engine.free_imm(self._imm), self._decoder.engine.free_imm(self._seal_imm)
        except (StaleHandle, EngineClosed):  # the engine was closed: its immediates are gone
            return 0, 0
