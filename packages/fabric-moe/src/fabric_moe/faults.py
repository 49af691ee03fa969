"""Waiting for other ranks, and what becomes of it when they do not come: an error that names them, on every rank.

A rank that gives up leaves a note with all others, saying because of whom. One that waits for a rank that waits for a
third would otherwise name the second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

from fabric_core import BadRange, Expectation, FabricError, ProtocolError, Transfer, TransferError, WaitTimeout
from fabric_moe.errors import RankLost, StepError
from fabric_moe.generation import Generation, Write
from fabric_moe.layout import HEAD, MAGIC, MAX_CULPRITS
from fabric_moe.step import Step

if TYPE_CHECKING:
    from fabric_moe.group import MoeGroup

__all__ = ["Notes", "guard", "settle", "wait"]

T = TypeVar("T")

_SLICE = 0.02  # seconds between looks at what the others have noted
_NOBODY = "nobody in particular"


class Notes:
    """The notes of one generation: a line of memory for each other rank."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._written = False
        self._under_way: list[Transfer] = []

    def write(self, step: int, culprits: Sequence[int]) -> None:
        """Leave a note with all others, once; who cannot be reached hears nothing."""
        if self._written:
            return
        self._written = True
        gen = self._generation
        note = gen.outbound.note
        named = list(culprits)[:MAX_CULPRITS]
        note["generation"], note["step"], note["count"] = gen.number, step, len(named)
        note["ranks"][: len(named)] = named
        note["magic"] = MAGIC
        src, dst = gen.layout.out_note, gen.layout.note_at(gen.rank)
        before = len(gen.transfers[0])
        for rank in gen.members:
            if rank != gen.rank:  # also to the culprits: one that is only slow hears why it was left
                with contextlib.suppress(FabricError):
                    gen.post(0, None, [Write(rank, HEAD, src, dst)])
        self._under_way = gen.transfers[0][before:]

    def finish(self, seconds: float) -> None:
        """Wait until the notes have left, at most so long. Who leaves before the others know why is named itself."""
        deadline = time.monotonic() + seconds
        for transfer in self._under_way:
            with contextlib.suppress(FabricError):
                transfer.wait(max(0.0, deadline - time.monotonic()))

    def read(self, missing: Callable[[], Collection[int]]) -> tuple[int, int, list[int]] | None:
        """Return (who wrote it, at which step, because of whom), or None if nobody has given up.

        Who wrote that it leaves matters only to those who still need something from it: `missing` says from whom.
        """
        gen = self._generation
        for rank in gen.members:
            note = gen.inbound.notes[rank]
            if int(note["magic"]) == MAGIC and int(note["generation"]) == gen.number:
                count = min(int(note["count"]), MAX_CULPRITS)
                ranks = [int(r) for r in note["ranks"][:count]]
                if ranks != [rank] or rank in missing():
                    return rank, int(note["step"]), ranks
        return None


def wait(
    group: MoeGroup, expect: Callable[[Sequence[str]], Expectation], step: Step, name: str, deadline: float,
    missing: Callable[[], list[int]], first: Expectation | None = None,
) -> None:  # fmt: skip
    """Wait for arrivals of a step until the deadline, looking at what others note meanwhile. Raises RankLost.

    expect: begins to wait, and fails at once when one of these peers is lost. first: what it made already, if it did.
    missing: whose part is not here yet, by what lies in memory. A rank that is gone and has done its part is not
    missed: at the end of a job some leave while others still wait for a third.
    """
    gen = group.generation
    what = expect(gen.peers) if first is None else first
    left_us: set[int] = set()
    while True:
        left = deadline - time.monotonic()
        try:
            what.wait(max(0.0, min(left, _SLICE)))
            return
        except WaitTimeout:
            if (note := group.notes.read(missing)) is not None:
                raise _noted(group, *note) from None
            if (failed := step.failed()) is not None:
                raise failed from None
            if left <= 0:
                raise _lost(group, step.number, name, None, missing() or sorted(left_us)) from None
        except TransferError as error:
            late = missing()
            gone = gen.ranks_at(error.peer)
            if not gone or left_us.issuperset(gone) or not set(late).isdisjoint(gone):
                raise _lost(group, step.number, name, error, late) from error
            left_us.update(gone)
            what = expect(tuple({gen.addresses[rank]: None for rank in late}))


def settle(group: MoeGroup, slot: int) -> None:
    """Wait until the slot's outbound memory is free. Raises RankLost if a rank that it was sent to is gone."""
    try:
        group.generation.settle(slot, group.config.timeout)
    except (TransferError, WaitTimeout) as error:
        raise _lost(group, group.next_step, "end of writes", error, []) from error


def guard(group: MoeGroup, call: Callable[[], T]) -> T:
    """Make a call; what breaks in it, other than a wrong argument, breaks the group."""
    before = group.next_step
    try:
        return call()
    except RankLost:
        raise
    except TransferError as error:
        raise _lost(group, group.next_step - 1, "a write", error, []) from error
    except BaseException as error:
        own = isinstance(error, FabricError) and not isinstance(error, BadRange | StepError)
        begun = group.next_step != before  # a step, of which nobody knows what was sent: Ctrl-C, say
        if not own and not begun:
            raise  # nothing was sent, or the step is over, or the same call may be made again
        group.broken = error if isinstance(error, FabricError) else _interrupted(group, error)
        if not isinstance(error, ProtocolError):  # which the others see by themselves, and name better
            group.notes.write(group.next_step - 1, [group.rank])
        raise


def _interrupted(group: MoeGroup, error: BaseException) -> StepError:
    return StepError(
        f"rank {group.rank}, step {group.next_step - 1}: dispatch_send ended half-way with {error!r}; regroup() with "
        "all ranks, or close()"
    )


def _lost(group: MoeGroup, number: int, name: str, error: Exception | None, missing: list[int]) -> RankLost:
    """Make the error that names the culprits, break the group, and tell the others.

    A rank that has gone because of a third one has said so before: then that one is named.
    """
    gen = group.generation
    peer = getattr(error, "peer", None)
    there = [rank for rank in gen.ranks_at(peer) if rank != group.rank]
    if error is not None and (note := group.notes.read(lambda: there)) is not None:
        return _noted(group, *note)
    ranks = there or missing
    who = ", ".join(f"rank {rank} at {gen.addresses[rank]}" for rank in ranks) or _NOBODY
    words = f"rank {group.rank}, step {number}: " + (f"no {name} from {who}" if error is None else f"{who}: {error}")
    group.notes.write(number, ranks)
    group.broken = lost = RankLost(words, ranks=ranks, peer=peer)
    return lost


def _noted(group: MoeGroup, writer: int, number: int, ranks: list[int]) -> RankLost:
    who = ", ".join(f"rank {rank}" + (" (this rank)" if rank == group.rank else "") for rank in ranks) or _NOBODY
    group.notes.write(number, ranks)
    group.broken = lost = RankLost(f"rank {writer} gave up step {number} because of {who}", ranks=ranks)
    return lost
