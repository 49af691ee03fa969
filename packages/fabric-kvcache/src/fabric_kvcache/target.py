"""One decoder rank that a prefill rank writes to for a request: what is under way, and its one end.

It ends when it was sealed or stopped, and no write is under way any more. Only then is the decoder told that it was
stopped: after that message nothing can land.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from fabric_core import Cancelled, FabricError, Transfer, TransferError
from fabric_kvcache.plan import Plan
from fabric_kvcache.protocol import Ask
from fabric_kvcache.request import Request

if TYPE_CHECKING:
    from fabric_kvcache.sessions import Session

__all__ = ["How", "Target"]

log = logging.getLogger("fabric.kvcache")

How = Literal["refused", "failed", "cancelled", "forgotten"]
Submit = Callable[[Callable[[Transfer], None]], Transfer]


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

    @property
    def open(self) -> bool:
        """Whether it may be written to."""
        return self.stopped is None and not self._over

    @property
    def busy(self) -> bool:
        """Whether a write is under way."""
        return self._busy > 0

    def transfers(self) -> list[Transfer]:
        with self._lock:
            return list(self._transfers)

    def write(self, count: int, nbytes: int, submit: Submit, *, seal: bool = False) -> bool:
        """Submit `count` writes of `nbytes` by `submit(on_done)`; False: it was stopped, or is now, by submit's error.

        The place is taken before, so that a stop that comes in between waits for the write and does not miss it.
        """
        with self._lock:
            if self.stopped is not None or self._over:
                return False
            self._busy += 1
            self.writes += count
            self.nbytes += nbytes
            self.sealed |= seal
        try:
            transfer = submit(self._done)
        except FabricError as error:  # of this decoder rank; the others go on
            self.stop("failed", f"a write could not be submitted: {error}", error)
            self._leave(None)
            return False
        except BaseException:
            self._leave(None)
            raise
        with self._lock:
            if transfer in self._early:
                self._early.discard(transfer)
            else:
                self._transfers.add(transfer)
            late = self.stopped is not None
        if late:
            transfer.cancel()
        return True

    def _done(self, transfer: Transfer) -> None:
        error = transfer.exception()
        if isinstance(error, TransferError) and not (isinstance(error, Cancelled) and self.stopped is not None):
            self.stop("failed", f"a write failed: {error}", error)
        self._leave(transfer)

    def _leave(self, transfer: Transfer | None) -> None:
        with self._lock:
            self._busy -= 1
            if transfer in self._transfers:
                self._transfers.discard(transfer)
            elif transfer is not None:
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
        for transfer in under_way:
            transfer.cancel()
        self._maybe_end()

    def _maybe_end(self) -> None:
        with self._lock:
            if self._over or self._busy or not (self.sealed or self.stopped is not None):
                return
            self._over = True
        self.on_ended(self)
