"""Block tables: which pool page holds which page of a request. One list per group; a state has one entry, a slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange
from fabric_kvcache.cache import CacheLayout, Group, StateGroup
from fabric_kvcache.shard import Shard

__all__ = ["Tables", "checked", "needed", "used"]

Tables = tuple[NDArray[np.uint32], ...]


def needed(layout: CacheLayout, total: int) -> tuple[int, ...]:
    """Return how many entries each group's table has for a prompt of `total` tokens."""
    return tuple(1 if isinstance(g, StateGroup) else -(-total // g.page_tokens) for g in layout.groups)


def used(group: Group, start: int, total: int) -> tuple[int, int]:
    """Return (first, end) of the entries that are written when the first `start` tokens are there already."""
    if isinstance(group, StateGroup):
        return 0, 1
    first = max(start, total - group.window if group.window else 0)
    return first // group.page_tokens, -(-total // group.page_tokens)


def checked(shard: Shard, given: Sequence[Any], start: int, total: int) -> Tables:
    """Return tables as u32 arrays of the length that is needed.

    Raises BadRange: too short, a page outside its pool, or one that would be written for two places of the request.
    Entries that are not written (before `start`, or outside a window) may be anything that is a page.
    """
    groups = shard.layout.groups
    if len(given) != len(groups):
        raise BadRange(f"{len(given)} block tables for a layout of {len(groups)} groups: give one for each")
    made = []
    for number, (group, table, count, pool) in enumerate(
        zip(groups, given, needed(shard.layout, total), shard.pool_pages, strict=True)
    ):
        array = np.asarray(table)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise BadRange(f"block table {number}: a list of page numbers, not {array.dtype} of shape {array.shape}")
        if len(array) < count:
            raise BadRange(f"block table {number}: {len(array)} pages for {total} tokens, {count} are needed")
        array = array[:count]
        least, most = int(array.min()), int(array.max())
        if least < 0 or most >= pool:
            raise BadRange(f"block table {number}: page {least if least < 0 else most} of a pool of {pool} pages")
        first, end = used(group, start, total)
        if len(np.unique(array[first:end])) != end - first:
            raise BadRange(f"block table {number}: a page is named twice")
        made.append(array.astype(np.uint32))
    return tuple(made)
