"""From a push to the engine's writes: what is submitted for pages, a tail and a seal, and when a push has ended.

A `Submit` is one of the engine's submits with all but its last argument, `submit(timeout=seconds)`. Those of pages are
made before their layer is ready, so that little is left to do then.
"""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabric_core import FabricError, MrHandle, StepWrite
from fabric_kvcache.protocol import SEAL
from fabric_kvcache.target import OnDone, Submit, Target

if TYPE_CHECKING:
    from fabric_kvcache.prefiller import Prefiller

__all__ = ["Piece", "Push", "Sender"]

Piece = tuple[int, Any, Any]  #: bytes of one write, source pages, target pages


@dataclass(slots=True)
class Push:
    """One submitted piece, and when: times of `time.perf_counter()`. `done` is 0.0 until its end was seen."""

    layer: int  #: or TAIL
    writes: int
    nbytes: int
    began: float = 0.0  #: copying into the source pages
    submitting: float = 0.0
    submitted: float = 0.0  #: the submit has returned
    done: float = 0.0
    left: int = 0  #: transfers whose end was not seen


class Sender:
    """Makes the submits of one job, and hears of their ends."""

    def __init__(self, prefiller: Prefiller) -> None:
        self._p = prefiller
        self.changed = threading.Condition()  # guards the ends of pushes

    def pages(self, target: Target, piece: Piece, on_done: OnDone) -> Submit:
        """Return the submit of pieces of one length."""
        length, source, to = piece
        return functools.partial(
            self._p.engine.submit_paged_writes,
            length,
            target.head.imm,
            (self._p.pool.handle, source),
            (target.session.desc, to),
            on_done,
        )

    def ahead(self, target: Target, piece: Piece, lane: int) -> StepWrite:
        """Return the same for the engine to submit when a word says so."""
        length, source, to = piece
        src, dst = (self._p.pool.handle, source), (target.session.desc, to)
        return StepWrite(length, target.head.imm, src, dst, deadline=target.deadline, lane=lane)

    def tail(self, target: Target, source: tuple[MrHandle, int], nbytes: int, on_done: OnDone) -> Submit:
        """Return the submit of a tail."""
        to = (target.session.slots, target.head.tail_offset)
        return functools.partial(self._p.engine.submit_single_write, nbytes, target.head.imm, source, to, on_done)

    def seal(self, target: Target, slot: int, on_done: OnDone) -> Submit:
        """Return the submit of what lies in a slot of the seals."""
        source = (self._p.seals.handle, self._p.seals.offset(slot))
        to = (target.session.slots, target.head.seal_offset)
        imm = target.head.seal_imm
        return functools.partial(self._p.engine.submit_single_write, SEAL.size, imm, source, to, on_done)

    def ended(self, push: Push, transfers: int = 1) -> None:
        """So many of its transfers have ended, or were not submitted after all. With the last one the time is noted."""
        with self.changed:
            push.left -= transfers
            if not push.left:
                push.done = time.perf_counter()
                self.changed.notify_all()

    def settle(self, targets: list[Target], pushes: list[Push], end: float) -> None:
        """Wait until all that was submitted has ended, and its ends were heard; at most until `end` (monotonic)."""
        for target in targets:
            for transfer in target.transfers():
                try:
                    transfer.wait(max(0.0, end - time.monotonic()))  # helps the engine along, as a condition does not
                except FabricError:  # the target has heard of it
                    pass
        with self.changed:  # the callbacks, for the times they note
            self.changed.wait_for(lambda: not any(push.left for push in pushes), max(0.0, end - time.monotonic()))
        while any(target.busy for target in targets) and time.monotonic() < end:
            with self.changed:
                self.changed.wait(0.005)  # the last step of a callback
