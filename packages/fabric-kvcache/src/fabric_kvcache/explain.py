"""Would two layouts work together, and what would it cost? Counts the real plans of all pairs of ranks."""

from __future__ import annotations

import dataclasses

import numpy as np

from fabric_core import ConfigError
from fabric_core.cli.models import Model
from fabric_kvcache.cache import CacheLayout, StateGroup, show_layers
from fabric_kvcache.match import LayoutMismatch, Pair, match
from fabric_kvcache.pieces import box
from fabric_kvcache.plan import Chunk, Plan, make_plan
from fabric_kvcache.shard import Field, Shard

__all__ = ["GroupCost", "KvExplain", "explain"]

_MAX_PAIRS = 1 << 14


class GroupCost(Model):
    """What moves from one group into another, all ranks and layers of it together."""

    kind: str
    layers: str
    layer_count: int
    source: str
    destination: str
    source_axes: str
    destination_axes: str
    pages: int  #: of the destination, over its layers and ranks; for a state, slots
    bytes: int
    writes: int  #: where no two pages are adjacent on both sides
    writes_adjacent: int  #: where all pages of a request are
    longest_bytes: int  #: of one write, pages not being adjacent
    bytes_per_page: float
    writes_per_page: float


class KvExplain(Model):
    """The data of schema fabric.kv.explain/1."""

    works: bool
    reason: str  #: why it does not
    tokens: int  #: of the request that is counted
    groups: list[GroupCost]
    bytes: int
    writes: int
    writes_adjacent: int
    bytes_per_token: float
    writes_per_token: float
    sources_least: int  #: source ranks that write to one destination rank
    sources_most: int
    busiest_source: float  #: bytes of the source rank with the most, over the mean of its PP rank's


def explain(src: CacheLayout, dst: CacheLayout, *, tokens: int, seed: int = 0) -> KvExplain:
    """Count a request of `tokens` tokens. Never raises LayoutMismatch: the reason is in the result."""
    try:
        pairs = match(src, dst)
    except LayoutMismatch as mismatch:
        return KvExplain(
            works=False, reason=str(mismatch), tokens=tokens, groups=[], bytes=0, writes=0, writes_adjacent=0,
            bytes_per_token=0, writes_per_token=0, sources_least=0, sources_most=0, busiest_source=0,
        )  # fmt: skip
    ranks = src.tp * src.pp * dst.tp * dst.pp
    if ranks > _MAX_PAIRS:
        raise ConfigError(f"{ranks} pairs of ranks: at most {_MAX_PAIRS} are counted; try smaller tp and pp")
    chunk = Chunk(0, tokens, tokens)
    senders, takers = _ranks(src, tokens), _ranks(dst, tokens)
    plans = [[make_plan(a, b, seed=seed) for a in senders] for b in takers]
    groups = [_cost(pair, [plan for row in plans for plan in row], chunk) for pair in pairs]
    sent = np.array([[plan.nbytes(chunk) for plan in row] for row in plans])
    fan_in = (sent > 0).sum(axis=1)
    by_stage = sent.sum(axis=0).reshape(src.pp, src.tp)
    nbytes, writes = sum(group.bytes for group in groups), sum(group.writes for group in groups)
    return KvExplain(
        works=True,
        reason="",
        tokens=tokens,
        groups=groups,
        bytes=nbytes,
        writes=writes,
        writes_adjacent=sum(group.writes_adjacent for group in groups),
        bytes_per_token=nbytes / tokens,
        writes_per_token=writes / tokens,
        sources_least=int(fan_in.min()),
        sources_most=int(fan_in.max()),
        busiest_source=float(np.max(by_stage.max(axis=1) / np.maximum(1, by_stage.mean(axis=1)))),
    )


def _pages(layout: CacheLayout, tokens: int) -> tuple[int, ...]:
    return tuple(1 if isinstance(group, StateGroup) else -(-tokens // group.page_tokens) for group in layout.groups)


def _ranks(layout: CacheLayout, tokens: int) -> list[Shard]:
    pages = _pages(layout, tokens)
    return [Shard(layout, tp=tp, pp=pp, pages=pages) for pp in range(layout.pp) for tp in range(layout.tp)]


def _cost(pair: Pair, plans: list[Plan], chunk: Chunk) -> GroupCost:
    src, dst = plans[0].src.layout, plans[0].dst.layout
    a, b = src.groups[pair.src], dst.groups[pair.dst]
    nbytes = writes = adjacent = longest = 0
    for whole in plans:
        jobs = tuple(job for job in whole.jobs if (job.src_group, job.dst_group) == (pair.src, pair.dst))
        if not jobs:
            continue
        plan = dataclasses.replace(whole, jobs=jobs)
        nbytes += plan.nbytes(chunk)
        writes += plan.writes(chunk)
        tables = ([np.arange(count) for count in _pages(layout, chunk.total)] for layout in (src, dst))
        adjacent += plan.moves(chunk, *tables).writes
        longest = max(longest, *(_longest(job.src, job.dst, job.units, chunk.total) for job in jobs))
    first = 0 if isinstance(b, StateGroup) or not b.window else max(0, chunk.total - b.window) // b.page_tokens
    pages = (_pages(dst, chunk.total)[pair.dst] - first) * len(pair.layers) * dst.tp
    return GroupCost(
        kind=str(type(a).__struct_config__.tag),
        layers=show_layers(tuple(pair.layers)),
        layer_count=len(pair.layers),
        source=str(a),
        destination=str(b),
        source_axes=a.axes,
        destination_axes=b.axes,
        pages=pages,
        bytes=nbytes,
        writes=writes,
        writes_adjacent=adjacent,
        longest_bytes=longest,
        bytes_per_page=nbytes / pages,
        writes_per_page=writes / pages,
    )


def _longest(src: Field, dst: Field, units: tuple[int, int], total: int) -> int:
    tokens = max(1, min(src.tokens, dst.tokens, total))
    return box(src, dst, *units, tokens)[0]
