"""Waiting for other ranks, and what becomes of it when they do not come: an error that names them, on every rank.

A rank that gives up leaves a note with all others, saying because of whom. One that waits for a rank that waits for a
third would otherwise name the second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from fabric_core import BadRange, Expectation, FabricError, TransferError, WaitTimeout
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
        for rank in gen.members:
            if rank != gen.rank:  # also to the culprits: one that is only slow hears why it was left
                with contextlib.suppress(FabricError):
                    gen.post(0, None, [Write(rank, HEAD, src, dst)])

    def read(self) -> tuple[int, int, list[int]] | None:
        """Return (who wrote it, at which step, because of whom), or None if nobody has given up."""
        gen = self._generation
        for rank in gen.members:
            note = gen.inbound.notes[rank]
            if int(note["magic"]) == MAGIC and int(note["generation"]) == gen.number:
                count = min(int(note["count"]), MAX_CULPRITS)
                return rank, int(note["step"]), [int(r) for r in note["ranks"][:count]]
        return None


def wait(
    group: MoeGroup, what: Expectation, step: Step, name: str, deadline: float, missing: Callable[[], list[int]]
) -> None:
    """Wait for arrivals of a step until the deadline, looking at what others note meanwhile.

    `missing` says whose part is not here yet, by what lies in memory. Raises RankLost.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            what.wait(max(0.0, min(left, _SLICE)))
            return
        except WaitTimeout:
            if (note := group.notes.read()) is not None:
                raise _noted(group, *note) from None
            if step.error is not None:
                raise step.error from None
            if left <= 0:
                raise _lost(group, step.number, name, None, missing()) from None
        except TransferError as error:
            raise _lost(group, step.number, name, error, missing()) from error


def settle(group: MoeGroup, slot: int) -> None:
    """Wait until the slot's outbound memory is free. Raises RankLost if a rank that it was sent to is gone."""
    try:
        group.generation.settle(slot, group.config.timeout)
    except (TransferError, WaitTimeout) as error:
        raise _lost(group, group.next_step, "end of writes", error, []) from error


def guard(group: MoeGroup, call: Callable[[], T]) -> T:
    """Make a call; what breaks in it, other than a wrong argument, breaks the group."""
    try:
        return call()
    except (BadRange, StepError):
        raise  # nothing was sent, or the step is over
    except RankLost:
        raise
    except TransferError as error:
        raise _lost(group, group.next_step - 1, "a write", error, []) from error
    except FabricError as error:
        group.broken = error
        raise


def _lost(group: MoeGroup, number: int, name: str, error: Exception | None, missing: list[int]) -> RankLost:
    """Make the error that names the culprits, break the group, and tell the others."""
    gen = group.generation
    peer = getattr(error, "peer", None)
    ranks = [rank for rank in gen.ranks_at(peer) if rank != group.rank] or missing
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
