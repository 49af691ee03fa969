"""Who sends what several ranks hold: MLA's latent, KV heads above which TP goes, units of a state.

A destination needs each unit of each layer once. Where several source ranks hold it, each (layer, destination rank) is
given to one of them: round robin, over an order of the sources that the seed decides. So one request uses all source
ranks evenly, and requests with different seeds start elsewhere. Every rank computes this by itself and must come to the
same result, so the order is made with a hash and not by a library's random numbers, which may change with its version.
"""

from __future__ import annotations

import functools
from hashlib import blake2b

from fabric_kvcache.shard import held

__all__ = ["common", "holders", "sender"]


def holders(units: int, tp: int, unit: int) -> range:
    """Return the TP ranks that hold a unit."""
    if units >= tp:
        rank = unit // (units // tp)
        return range(rank, rank + 1)
    copies = tp // units
    return range(unit * copies, (unit + 1) * copies)


@functools.lru_cache(maxsize=4096)
def _order(seed: int, unit: int, ranks: range) -> tuple[int, ...]:
    def mixed(rank: int) -> bytes:
        return blake2b(f"{seed}/{unit}/{rank}".encode(), digest_size=8).digest()

    return tuple(sorted(ranks, key=mixed))


def sender(seed: int, units: int, unit: int, src_tp: int, dst_tp: int, dst_rank: int, layer: int) -> int:
    """Return the source's TP rank that writes a unit of a layer to a destination's TP rank that holds it.

    `layer` counts the layers of the source rank's pool, so that neighbours go to different senders.
    """
    order = _order(seed, unit, holders(units, src_tp, unit))
    takers = holders(units, dst_tp, unit)
    return order[(layer * len(takers) + takers.index(dst_rank)) % len(order)]


def common(units: int, src_tp: int, src_rank: int, dst_tp: int, dst_rank: int) -> tuple[int, int]:
    """Return (first, count) of the units that both ranks hold; count may be 0."""
    a, n = held(units, src_tp, src_rank)
    b, m = held(units, dst_tp, dst_rank)
    first = max(a, b)
    return first, max(0, min(a + n, b + m) - first)
