"""The address calculus: what one rank of a source writes into one rank of a destination, whatever their layouts.

    plan = make_plan(Shard(prefill_layout, tp=1, pages=4096), Shard(decode_layout, tp=0, pages=2048), seed=request_seed)
    moves = plan.moves(Chunk(0, 1000, total=5000), src_pages, dst_pages)
    for length, src, dst in moves.at(layer):
        engine.submit_paged_writes(length, imm, (handle, src), (desc, dst))

A plan is made once per pair of ranks and seed; moves once per chunk: all layers share them, but for an offset. Over all
source ranks, and over chunks that partition a prompt, every wanted byte of the destination is written exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_core import BadRange, ConfigError
from fabric_kvcache.cache import StateGroup
from fabric_kvcache.match import match
from fabric_kvcache.moves import Moves, Part
from fabric_kvcache.pieces import Pieces, Table, box, cut, of_pages, of_tokens
from fabric_kvcache.replicas import common, sender
from fabric_kvcache.shard import Field, Shard

__all__ = ["Chunk", "Plan", "make_plan"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `first` to `end` of a prompt of `total`, of which the destination has the first `start` already."""

    first: int
    end: int
    total: int
    start: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.first < self.end <= self.total:
            raise BadRange(
                f"chunk {self.first}..{self.end} of {self.total} tokens, {self.start} of them there already: "
                "must be 0 <= start <= first < end <= total"
            )


@dataclass(frozen=True, slots=True)
class _Job:
    """One field of a pair of groups."""

    src_group: int
    dst_group: int
    src: Field
    dst: Field
    units: tuple[int, int]  #: (first, count)
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Made by `make_plan`."""

    src: Shard
    dst: Shard
    jobs: tuple[_Job, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layers of which something moves between these two ranks."""
        return tuple(sorted({layer for job in self.jobs for layer in job.layers}))

    def moves(self, chunk: Chunk, src_pages: Sequence[Any], dst_pages: Sequence[Any], *, merge: bool = True) -> Moves:
        """Return what to write for a chunk.

        `src_pages`, `dst_pages`: for each group of that side's layout the block table of the whole request, from its
        token 0 on: numbers of pages in the pool. Entries of pages that do not move are not looked at. A state has one.
        `merge`: join what is adjacent on both sides. Without it `writes` does not depend on the tables (see `writes`).

        Raises BadRange for a table that is too short, leaves its pool, or names a page of the destination twice.
        """
        found: dict[tuple[Any, ...], list[tuple[Pieces, _Job]]] = {}
        tables = _Tables(self, src_pages, dst_pages)
        for job in self.jobs:
            pieces = self._pieces(job, chunk, tables)
            if pieces is not None:
                key = (job.src_group, job.dst_group, job.layers, job.src.layer, job.dst.layer)
                found.setdefault(key, []).append((pieces, job))
        parts = []
        for (src_group, dst_group, layers, src_step, dst_step), items in found.items():
            at = (
                {layer: self.src.layers(src_group).index(layer) * src_step for layer in layers},
                {layer: self.dst.layers(dst_group).index(layer) * dst_step for layer in layers},
            )
            parts.append(Part.make(Pieces.join([pieces for pieces, _job in items]), *at, merge=merge))
        return Moves(tuple(parts))

    def writes(self, chunk: Chunk) -> int:
        """Return how many writes `moves(..., merge=False)` has, from the layouts alone: both sides can compute it."""
        return sum(n * len(job.layers) for job, n, _nbytes in self._sizes(chunk))

    def nbytes(self, chunk: Chunk) -> int:
        """Return how many bytes move for a chunk."""
        return sum(nbytes * len(job.layers) for job, _n, nbytes in self._sizes(chunk))

    # ---- inside

    def _range(self, job: _Job, chunk: Chunk) -> tuple[int, int]:
        """Return the tokens of a chunk that move for a group; (0, 0) for none.

        Where pages have scales, only whole pages of the source move, because a page's scale is final when it is full;
        what a chunk leaves behind goes with the next one.
        """
        group, other = self.dst.layout.groups[job.dst_group], self.src.layout.groups[job.src_group]
        assert not isinstance(group, StateGroup)
        assert not isinstance(other, StateGroup)
        least = max(chunk.start, chunk.total - group.window if group.window else 0)
        first, end = chunk.first, chunk.end
        if group.scale_bytes:
            if chunk.start % group.page_tokens:
                raise BadRange(
                    f"start={chunk.start}: the destination's pages have scales, so what it has already must end at "
                    f"a page of {group.page_tokens} tokens"
                )
            size = other.page_tokens
            first = first - first % size
            end = end if end == chunk.total else end - end % size
        first = max(first, least)
        return (first, end) if first < end else (0, 0)

    def _pieces(self, job: _Job, chunk: Chunk, tables: _Tables) -> Pieces | None:
        if isinstance(self.dst.layout.groups[job.dst_group], StateGroup):
            if chunk.end != chunk.total:
                return None
            slot = np.zeros(1, np.int64)
            return of_pages(job.src, job.dst, job.units, tables.src(job, slot)[slot], tables.dst(job, slot)[slot])
        first, end = self._range(job, chunk)
        if first == end:
            return None
        a, b = _page_tokens(self.src, job.src_group), _page_tokens(self.dst, job.dst_group)
        mine = np.arange(first // a, (end - 1) // a + 1, dtype=np.int64)
        yours = np.arange(first // b, (end - 1) // b + 1, dtype=np.int64)
        here, there = tables.src(job, mine), tables.dst(job, yours)
        if job.dst.tokens:
            return of_tokens(job.src, job.dst, job.units, (first, end), (here, there))
        return of_pages(job.src, job.dst, job.units, here[yours * b // a], there[yours])

    def _sizes(self, chunk: Chunk) -> list[tuple[_Job, int, int]]:
        """Return (job, pieces, bytes) of one layer."""
        sizes = []
        for job in self.jobs:
            n = nbytes = 0
            if isinstance(self.dst.layout.groups[job.dst_group], StateGroup):
                boxes = {1: 1} if chunk.end == chunk.total else {}
            else:
                first, end = self._range(job, chunk)
                boxes = {}
                if first < end and job.dst.tokens:
                    cuts = np.unique(cut(first, end, job.src.tokens, job.dst.tokens)[1], return_counts=True)
                    boxes = dict(zip(cuts[0].tolist(), cuts[1].tolist(), strict=True))
                elif first < end:
                    size = _page_tokens(self.dst, job.dst_group)
                    boxes = {1: (end - 1) // size - first // size + 1}
            for tokens, count in boxes.items():
                length, offsets, _ = box(job.src, job.dst, *job.units, tokens)
                n += count * len(offsets)
                nbytes += count * len(offsets) * length
            sizes.append((job, n, nbytes))
        return sizes


class _Tables:
    """The block tables of a call, each looked at once per range of pages."""

    def __init__(self, plan: Plan, src: Sequence[Any], dst: Sequence[Any]) -> None:
        for side, shard, given in (("source", plan.src, src), ("destination", plan.dst, dst)):
            if len(given) != len(shard.layout.groups):
                raise BadRange(
                    f"{len(given)} page lists of the {side}, whose layout has {len(shard.layout.groups)} groups: "
                    "give one for each"
                )
        self._plan = plan
        self._src = src
        self._dst = dst
        self._known: dict[tuple[bool, int, int, int], Table] = {}

    def src(self, job: _Job, wanted: Table) -> Table:
        return self._table(False, job.src_group, wanted)

    def dst(self, job: _Job, wanted: Table) -> Table:
        return self._table(True, job.dst_group, wanted)

    def _table(self, is_dst: bool, group: int, wanted: Table) -> Table:
        """Return the table; `wanted` are consecutive entries, and all that will be looked at."""
        key = (is_dst, group, int(wanted[0]), len(wanted))
        if key not in self._known:
            self._known[key] = self._checked(is_dst, group, wanted)
        return self._known[key]

    def _checked(self, is_dst: bool, group: int, wanted: Table) -> Table:
        name = "destination" if is_dst else "source"
        shard = self._plan.dst if is_dst else self._plan.src
        table = np.asarray((self._dst if is_dst else self._src)[group])
        pool = shard.pool_pages[group]
        where = f"the {name}'s pages of group {group}"
        if table.ndim != 1 or table.dtype.kind not in "iu":
            raise BadRange(f"{where}: must be a list of page numbers, not {table.dtype} of shape {table.shape}")
        if len(table) <= wanted[-1]:
            raise BadRange(f"{where}: {len(table)} pages, but the tokens reach into page {int(wanted[-1])}")
        used = table[wanted[0] : wanted[-1] + 1]
        least, most = int(used.min()), int(used.max())
        if least < 0 or most >= pool:
            raise BadRange(f"{where}: page {least if least < 0 else most} of a pool of {pool} pages")
        if is_dst and len(np.unique(used)) != len(used):
            raise BadRange(f"{where}: a page is named twice")
        return table.astype(np.int64)


def _page_tokens(shard: Shard, group: int) -> int:
    found = shard.layout.groups[group]
    assert not isinstance(found, StateGroup)
    return found.page_tokens


def make_plan(src: Shard, dst: Shard, *, seed: int = 0) -> Plan:
    """Plan what rank `src` writes into rank `dst`; the seed must be the same at all source ranks of a request.

    Raises LayoutMismatch where the layouts cannot be mapped.
    """
    if not isinstance(seed, int):
        raise ConfigError(f"seed={seed!r}: must be an integer")
    jobs = []
    for pair in match(src.layout, dst.layout):
        mine, yours = src.layers(pair.src), set(dst.layers(pair.dst)) & pair.layers
        layers = [(number, layer) for number, layer in enumerate(mine) if layer in yours]
        theirs = {field.name: field for field in dst.fields(pair.dst)}
        for a in src.fields(pair.src) if layers else ():
            b = theirs[a.name]
            units = common(a.units, src.layout.tp, src.tp, dst.layout.tp, dst.tp)
            if not units[1]:
                continue
            moved = tuple(layer for number, layer in layers if _is_mine(a, units[0], src, dst, seed, number))
            if moved:
                jobs.append(_Job(pair.src, pair.dst, a, b, units, moved))
    return Plan(src, dst, tuple(jobs))


def _is_mine(field: Field, unit: int, src: Shard, dst: Shard, seed: int, layer: int) -> bool:
    """Whether this source rank is the one that sends a layer: always, unless others hold the same unit."""
    if field.units >= src.layout.tp:
        return True
    return sender(seed, field.units, unit, src.layout.tp, dst.layout.tp, dst.tp, layer) == src.tp
