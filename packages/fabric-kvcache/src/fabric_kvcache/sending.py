"""From a push to the engine's writes: pages, a tail, a seal; and when they have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabric_core import MrHandle, Transfer
from fabric_kvcache.protocol import SEAL
from fabric_kvcache.target import Target

if TYPE_CHECKING:
    from fabric_kvcache.prefiller import Prefiller

__all__ = ["Push", "Sender"]

Done = Callable[[Transfer | None], None]
Ended = Callable[[Transfer], None]


@dataclass(slots=True)
class Push:
    """One submitted piece, and when: times of `time.perf_counter()`. `done` is 0.0 until its end was seen."""

    layer: int  #: or TAIL
    writes: int
    nbytes: int
    began: float  #: copying into the source pages
    submitting: float
    submitted: float = 0.0  #: the submit has returned
    done: float = 0.0


def _both(done: Done, ended: Ended) -> Ended:
    def call(transfer: Transfer) -> None:
        done(transfer)
        ended(transfer)

    return call


class Sender:
    """Submits for one job. Each method is given `ended`, which the target wants to hear, and may note a time before."""

    def __init__(self, prefiller: Prefiller) -> None:
        self._p = prefiller
        self.changed = threading.Condition()  # guards the times of pushes, and the one below
        self.under_way = 0  #: pushes

    def single(
        self,
        target: Target,
        source: tuple[MrHandle, int],
        nbytes: int,
        offset: int,
        done: Done,
        ended: Ended,
    ) -> Transfer:
        """Submit a tail."""
        session = target.session
        left = max(0.0, target.deadline - time.monotonic())
        return self._p.engine.submit_single_write(
            nbytes, target.head.imm, source, (session.slots, offset), _both(done, ended), timeout=left
        )

    def pages(
        self,
        target: Target,
        piece: tuple[int, Any, Any],
        done: Done,
        ended: Ended,
    ) -> Transfer:
        """Submit pieces of one length: (length, source pages, target pages)."""
        length, source, to = piece
        return self._p.engine.submit_paged_writes(
            length,
            target.head.imm,
            (self._p.pool.handle, source),
            (target.session.desc, to),
            _both(done, ended),
            timeout=max(0.0, target.deadline - time.monotonic()),
        )

    def seal(self, target: Target, slot: int, ended: Ended) -> Transfer:
        """Submit what lies in a slot of the seals; the slot is free again at the end."""
        return self._p.engine.submit_single_write(
            SEAL.size,
            target.head.seal_imm,
            (self._p.seals.handle, self._p.seals.offset(slot)),
            (target.session.slots, target.head.seal_offset),
            _both(lambda _: self._p.seals.give(slot), ended),
            timeout=max(0.0, target.deadline - time.monotonic()),
        )

    def when_done(self, push: Push, transfers: int) -> Done:
        """Return what is called at the end of each of a push's transfers, and notes the time of the last one."""
        left = [transfers]
        if not transfers:
            push.done = time.perf_counter()
        else:
            with self.changed:
                self.under_way += 1

        def done(_: Transfer | None) -> None:
            with self.changed:
                left[0] -= 1
                if not left[0]:
                    push.done = time.perf_counter()
                    self.under_way -= 1
                    self.changed.notify_all()

        return done
