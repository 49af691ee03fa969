"""Pages are filled with NaN before a transfer and looked through after it, so that what was not written is named.

Only where the host can reach the memory. `fill` and `missing` look at exactly what a request wants: the tokens from
`start` on (of a window, the last ones), and a state's slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from fabric_kvcache.cache import StateGroup
from fabric_kvcache.shard import Field, Shard
from fabric_kvcache.tables import Tables, used

__all__ = ["POISON", "Missing", "fill", "missing", "wanted_pages"]

POISON = 0xFF  #: as bytes of any float format of ITEM_BYTES: a NaN that no computation makes


class Missing(NamedTuple):
    """A page that was not written, or not to its end."""

    layer: int
    number: int  #: which of the request's pages
    page: int  #: which of the pool's

    def __str__(self) -> str:
        return f"layer {self.layer} page {self.number} (pool page {self.page})"


def _view(octets: NDArray[np.uint8], shard: Shard, group: int, field: Field) -> NDArray[np.uint8]:
    """View a field of a pool as [layer, page, plane, unit, token, byte]."""
    shape = (len(shard.layers(group)), shard.pool_pages[group], field.planes, field.count, field.tokens or 1)
    strides = (field.layer, field.page, field.plane, field.unit, field.token, 1)
    return as_strided(octets[field.base :], (*shape, field.item), strides)


def _parts(shard: Shard, tables: Tables, start: int, total: int) -> Iterator[tuple[int, Field, int, list[slice]]]:
    """Yield (group, field, first page, the tokens that are wanted of each page from there on)."""
    for number, group in enumerate(shard.layout.groups):
        if not shard.layers(number):
            continue
        first, end = used(group, start, total)
        for field in shard.fields(number):
            if isinstance(group, StateGroup) or not field.tokens:
                yield number, field, first, [slice(0, 1)] * (end - first)
                continue
            size = group.page_tokens
            least = max(start, total - group.window if group.window else 0)
            yield (
                number,
                field,
                first,
                [slice(max(least - k * size, 0), min(total - k * size, size)) for k in range(first, end)],
            )


def _runs(tokens: list[slice]) -> Iterator[tuple[int, int, slice]]:
    """Yield (first, end, tokens) of runs of pages of which the same tokens are wanted: the inner ones are whole."""
    at = 0
    for k in range(1, len(tokens) + 1):
        if k == len(tokens) or tokens[k] != tokens[at]:
            yield at, k, tokens[at]
            at = k


def fill(octets: NDArray[np.uint8], shard: Shard, tables: Tables, start: int, total: int) -> None:
    """Poison what a request wants."""
    for group, field, first, tokens in _parts(shard, tables, start, total):
        view = _view(octets, shard, group, field)
        for a, b, which in _runs(tokens):
            view[:, tables[group][first + a : first + b], :, :, which] = POISON


def missing(octets: NDArray[np.uint8], shard: Shard, tables: Tables, start: int, total: int) -> list[Missing]:
    """Return the pages that still hold poison, each once, sorted.

    An element of keys and values that is all poison tells; a scale or a unit of a state only if all of it is poison.
    """
    found: set[Missing] = set()
    for group, field, first, tokens in _parts(shard, tables, start, total):
        kind = shard.layout.groups[group]
        width = field.item if isinstance(kind, StateGroup) or not field.tokens else kind.item_bytes
        view = _view(octets, shard, group, field)
        for number, layer in enumerate(shard.layers(group)):  # one by one: the copies stay in the CPU's cache
            for a, b, which in _runs(tokens):
                pages = tables[group][first + a : first + b]
                for k in np.flatnonzero(_bad(view[number][pages][:, :, :, which], width)):
                    found.add(Missing(layer, first + a + int(k), int(pages[k])))
    return sorted(found)


def _bad(copied: NDArray[np.uint8], width: int) -> NDArray[Any]:
    """Of pages [page, ...]: whether one of their elements of `width` bytes is all poison."""
    flat = np.ascontiguousarray(copied).reshape(len(copied), -1)
    if width in {1, 2, 4, 8}:
        words = flat.view(f"u{width}")
        bad: NDArray[Any] = (words == words.dtype.type(-1 % (1 << 8 * width))).any(axis=1)
        return bad
    found: NDArray[Any] = (flat.reshape(len(flat), -1, width) == POISON).all(axis=2).any(axis=1)
    return found


def wanted_pages(shard: Shard, start: int, total: int) -> int:
    """Return how many pages a request wants, of all layers together."""
    return sum(
        len(shard.layers(number)) * (end - first)
        for number, group in enumerate(shard.layout.groups)
        for first, end in [used(group, start, total)]
    )
