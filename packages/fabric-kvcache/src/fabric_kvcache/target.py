"""One decoder rank that a prefill rank writes to for a request: what is under way, and its one end.

It ends when it was sealed or stopped, and no write is under way any more. Only then is the decoder told that it was
stopped: after that message nothing can land.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

from fabric_core import Cancelled, DeadlineExceeded, FabricError, Transfer, TransferError
from fabric_kvcache.plan import Plan
from fabric_kvcache.protocol import Ask
from fabric_kvcache.request import Request

if TYPE_CHECKING:
    from fabric_kvcache.sessions import Session

__all__ = ["How", "OnDone", "Submit", "Target"]

log = logging.getLogger("fabric.kvcache")

How = Literal["refused", "failed", "cancelled", "forgotten"]
OnDone = Callable[[Transfer], None]


class Submit(Protocol):
    """One of the engine's submits, with all its arguments but the last one."""

    def __call__(self, *, timeout: float) -> Transfer: ...


class Lent(Protocol):
    """Writes to one decoder rank that are submitted without asking here, because a word says so (ahead.py)."""

    def cancel(self) -> bool:
        """Submit none from now on; cancel what is under way. False: some are still to be adopted, then `returned`."""


class Target:
    """Any thread. `on_ended(target)` is called once, on the thread that saw the end."""

    def __init__(self, session: Session, head: Ask, request: Request, plan: Plan, deadline: float) -> None:
        self.session = session
        self.head = head
        self.request = request
        self.plan = plan
        self.deadline = deadline  #: of time.monotonic()
        self.on_ended: Callable[[Target], object] = lambda _: None
        self.writes = 0  #: submitted, each raises the data immediate
        self.nbytes = 0  #: of those
        self.stopped: tuple[How, str] | None = None
        self.error: FabricError | None = None  #: why it was stopped
        self.sealed = False
        self._lock = threading.Lock()  # guards the above and what follows
        self._busy = 0
        self._transfers: set[Transfer] = set()
        self._early: set[Transfer] = set()  # ended before they could be noted
        self._over = False
        self._lent: set[Lent] = set()

    @property
    def open(self) -> bool:
        """Whether it may be written to."""
        return self.stopped is None and not self._over

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return self._busy > 0 or (self.stopped is not None and bool(self._lent))

    def transfers(self) -> list[Transfer]:
        with self._lock:
            return list(self._transfers)

    def on_done(self, ended: Callable[[], object]) -> OnDone:
        """Return what a submit that is given to `write` must have called at its end. `ended()` is called before."""
        return functools.partial(self._done, ended)

    def write(self, count: int, nbytes: int, submits: tuple[Submit, ...], *, seal: bool = False) -> int:
        """Make these submits, which are `count` writes of `nbytes` in all. Return how many were made.

        Fewer than given: it was stopped, or is now, by the error of a submit. The places are taken before, so that a
        stop that comes in between waits for the writes and does not miss them.
        """
        with self._lock:
            if self.stopped is not None or self._over:
                return 0
            self._busy += len(submits)
            self.writes += count
            self.nbytes += nbytes
            self.sealed |= seal
        left = max(0.0, self.deadline - time.monotonic())
        made: list[Transfer] = []
        try:
            for submit in submits:
                made.append(submit(timeout=left))
        except FabricError as error:  # of this decoder rank; the others go on
            self.stop("failed", f"a write could not be submitted: {error}", error)
        finally:
            self._note(made, len(submits))
        return len(made)

    def lend(self, lent: Lent) -> None:
        """Somebody else may submit writes from now on, until they are `returned`; the end waits for that."""
        with self._lock:
            self._lent.add(lent)
            stopped = self.stopped is not None or self._over
        if stopped and lent.cancel():
            self.returned(lent)

    def adopt(self, count: int, nbytes: int, made: list[Transfer], on_done: OnDone) -> None:
        """Somebody else has submitted these transfers, of `count` writes of `nbytes`."""
        with self._lock:
            self._busy += len(made)
            self.writes += count
            self.nbytes += nbytes
        for transfer in made:
            transfer.add_done_callback(on_done)
        self._note(made, len(made))

    def returned(self, lent: Lent) -> None:
        """Of that nothing will be submitted any more, and all that was has been adopted. Idempotent."""
        with self._lock:
            self._lent.discard(lent)
        self._maybe_end()

    def _note(self, made: list[Transfer], wanted: int) -> None:
        """Remember what was submitted; give back the places of what was not."""
        with self._lock:
            for transfer in made:
                if transfer in self._early:
                    self._early.discard(transfer)
                else:
                    self._transfers.add(transfer)
            self._busy -= wanted - len(made)
            late = self.stopped is not None
        if late:
            for transfer in made:
                transfer.cancel()
        if len(made) < wanted:
            self._maybe_end()

    def _done(self, ended: Callable[[], object], transfer: Transfer) -> None:
        ended()
        error = transfer.exception()
        if isinstance(error, TransferError) and not (isinstance(error, Cancelled) and self.stopped is not None):
            self.stop("failed", f"a write failed: {error}", error)
        with self._lock:
            self._busy -= 1
            if transfer in self._transfers:
                self._transfers.discard(transfer)
            else:
                self._early.add(transfer)
        self._maybe_end()

    def stop(self, how: How, reason: str, error: FabricError) -> None:
        """Submit nothing any more, cancel what is under way, and end when that has ended. The first call counts."""
        with self._lock:
            if self.stopped is not None or self._over:
                return
            self.stopped = how, reason
            self.error = error
            under_way = list(self._transfers)
            lent = list(self._lent)
        for one in lent:
            if one.cancel():
                self.returned(one)
        for transfer in under_way:
            transfer.cancel()
        self._maybe_end()

    def expire(self) -> None:
        """Its deadline has passed."""
        what = f"the deadline of request {self.request.request_id} has passed"
        error = DeadlineExceeded(what, peer=str(self.session.address), op="prefill")
        self.stop("failed", "its deadline has passed", error)

    def _maybe_end(self) -> None:
        with self._lock:
            if self._over or self._busy or self._lent or not (self.sealed or self.stopped is not None):
                return
            self._over = True
        self.on_ended(self)
