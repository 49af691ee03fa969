"""Which prefill rank writes what to which decoder rank. Both sides compute it from the layouts and the seed alone."""

from __future__ import annotations

import functools
from hashlib import blake2b

from fabric_kvcache.cache import CacheLayout, StateGroup
from fabric_kvcache.plan import Plan, make_plan
from fabric_kvcache.shard import Shard

__all__ = ["Rank", "every_rank", "pair_plan", "seed_of", "sends_tail", "takers"]

Rank = tuple[int, int]  #: (tp, pp)


def seed_of(request_id: str) -> int:
    """Return the seed of a request that was given none: the same at all its ranks."""
    return int.from_bytes(blake2b(request_id.encode(errors="replace"), digest_size=4).digest(), "little")


def every_rank(layout: CacheLayout) -> list[Rank]:
    return [(tp, pp) for pp in range(layout.pp) for tp in range(layout.tp)]


@functools.lru_cache(maxsize=256)
def _seed_matters(layout: CacheLayout) -> bool:
    """Whether some bytes are held by several ranks of a source, so that the seed decides who sends them."""
    units = [
        n
        for group in layout.groups
        for n in ([part.units for part in group.parts] if isinstance(group, StateGroup) else [group.units])
    ]
    return min(units) < layout.tp


@functools.lru_cache(maxsize=4096)
def _plan(src: Shard, dst: Shard, seed: int) -> Plan:
    return make_plan(src, dst, seed=seed)


def pair_plan(src: Shard, dst: Shard, seed: int) -> Plan:
    """Return `make_plan`, remembered. Raises LayoutMismatch."""
    return _plan(src, dst, seed if _seed_matters(src.layout) else 0)


def sends_tail(src: Shard, dst: Rank, seed: int) -> bool:
    """Whether this prefill rank sends the tail to a decoder rank: one of the last stage, another one for each seed."""
    return src.pp == src.layout.pp - 1 and src.tp == (seed + dst[0]) % src.layout.tp


@functools.lru_cache(maxsize=4096)
def _takers(src: Shard, layout: CacheLayout, seed: int) -> frozenset[Rank]:
    return frozenset(
        (tp, pp) for tp, pp in every_rank(layout) if _plan(src, Shard(layout, tp=tp, pp=pp), seed).jobs
    )  # fmt: skip


def takers(src: Shard, layout: CacheLayout, seed: int, *, tail: bool) -> frozenset[Rank]:
    """Return the decoder ranks that ask this prefill rank for a request."""
    found = _takers(src, layout, seed if _seed_matters(src.layout) else 0)
    if not tail:
        return found
    return found | {rank for rank in every_rank(layout) if sends_tail(src, rank, seed)}
