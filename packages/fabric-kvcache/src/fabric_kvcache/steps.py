"""What is written when one layer of one chunk is ready: worked out beforehand, so that posting it is a few calls.

All layers of a chunk share their moves, but for an offset. A step is one layer of it, with the engine's submits as they
will be called.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fabric_kvcache.cache import AttentionGroup
from fabric_kvcache.moves import Moves
from fabric_kvcache.plan import Chunk
from fabric_kvcache.sending import Piece, Push, Sender
from fabric_kvcache.shard import Shard
from fabric_kvcache.tables import Tables
from fabric_kvcache.target import OnDone, Submit, Target

__all__ = ["Batch", "Step", "Steps", "same_pages"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Of a step: what goes to one decoder rank."""

    target: Target
    writes: int
    nbytes: int
    submits: tuple[Submit, ...]
    pieces: tuple[Piece, ...]  #: of each submit
    on_done: OnDone  #: of each


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens `first` to `end` of one layer."""

    layer: int
    first: int
    end: int
    batches: tuple[Batch, ...]
    transfers: int  #: submits
    push: Push


class Steps:
    """Makes the steps of one job."""

    def __init__(self, shard: Shard, targets: list[Target], sender: Sender, total: int) -> None:
        self._shard = shard
        self._targets = targets
        self._sender = sender
        self._total = total
        self._moves: dict[tuple[int, int, int, bool], Moves] = {}

    def make(self, layer: int, first: int, end: int, tables: Tables, *, padded: bool) -> Step:
        """Return what a layer of a chunk writes, from this rank's pages `tables`.

        `padded`: the last page of the prompt is zero behind it, and goes as a whole: one write instead of many.
        """
        batches: list[Batch] = []
        push = Push(layer, 0, 0)
        ended = functools.partial(self._sender.ended, push)
        for number, target in enumerate(self._targets):
            a = max(first, target.request.start)
            if a >= end:
                continue
            pieces = self._moves_of(number, a, end, tables, padded).at(layer)
            if pieces:
                writes = sum(len(source) for _length, source, _to in pieces)
                nbytes = sum(length * len(source) for length, source, _to in pieces)
                on_done = target.on_done(ended)
                submits = tuple(self._sender.pages(target, piece, on_done) for piece in pieces)
                batches.append(Batch(target, writes, nbytes, submits, tuple(pieces), on_done))
        push.writes = sum(batch.writes for batch in batches)
        push.nbytes = sum(batch.nbytes for batch in batches)
        push.left = sum(len(batch.submits) for batch in batches)
        return Step(layer, first, end, tuple(batches), push.left, push)

    def _moves_of(self, number: int, first: int, end: int, tables: Tables, padded: bool) -> Moves:
        """Return what a chunk writes: worked out at its first layer, the same for the others but for an offset."""
        padded = padded and end == self._total
        key = number, first, end, padded
        found = self._moves.get(key)
        if found is None:
            total, target = self._total, self._targets[number]
            if padded:
                size = self._shard.layout.groups[0].page_tokens  # type: ignore[union-attr]
                end = total = -(-total // size) * size
            chunk = Chunk(first, end, total, target.request.start)
            found = self._moves[key] = target.plan.moves(chunk, tables, target.request.tables)
        return found


def same_pages(target: Target) -> bool:
    """Whether pages are of one size on both sides, with nothing but tokens in them."""
    groups = [*target.plan.src.layout.groups, *target.plan.dst.layout.groups]
    return (
        all(isinstance(group, AttentionGroup) and not (group.window or group.scale_bytes) for group in groups)
        and len({group.page_tokens for group in groups if isinstance(group, AttentionGroup)}) == 1
    )
