"""What a KV cache holds in a benchmark: bytes that follow from the seed and from model coordinates alone.

A vector is known by (kind and name of the cache, layer, plane, head, token); its 64-bit words are a mixed number of
those, and steps from there. So the two sides make the same bytes for layouts that differ, and a vector in a wrong
place, in a wrong layer or of a wrong head does not compare equal.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_kvcache.cache import StateGroup
from fabric_kvcache.shard import Field, Shard

__all__ = ["POISON", "count_wrong", "fill"]

POISON = 0xEE  #: of bytes that nobody may write
_STEP = np.uint64(0x9E3779B97F4A7C15)
_SPREAD = np.uint64(0xD1B54A32D192ED03)
_SLICE = 1 << 24  # bytes compared at a time


def fill(memory: NDArray[np.uint8], shard: Shard, tables: list[Any], tokens: range, seed: int, scales: Scales) -> None:
    """Write the content of these tokens into a rank's memory; leave all other bytes as they are.

    `tables`: for each group the pages (of the pool) of the request, from token 0 on; a state has one.
    `scales`: tokens for which the *source* has one scale, by group identity (see `scale_tokens`).
    """
    for number, group in enumerate(shard.layout.groups):
        wanted = tokens
        window = 0 if isinstance(group, StateGroup) else group.window
        if window:
            wanted = range(max(tokens.start, tokens.stop - window), tokens.stop)
        for field in shard.fields(number):
            for place, layer in enumerate(shard.layers(number)):
                view = _layer(memory, field, place, shard.pool_pages[number])
                label = f"{seed}/{type(group).__name__}/{group.content}/{layer}/{field.name}"
                if isinstance(group, StateGroup):
                    view[tables[number][:1], 0] = _vectors(label, field, np.zeros(1, np.int64))
                elif field.tokens:
                    which = np.arange(wanted.start, wanted.stop)
                    pages = np.asarray(tables[number])[which // field.tokens]
                    view[pages, which % field.tokens] = _vectors(label, field, which)
                else:
                    first, last = wanted.start // group.page_tokens, (wanted.stop - 1) // group.page_tokens
                    pages = np.arange(first, last + 1)
                    source = pages * group.page_tokens // scales[group.content, layer]
                    view[np.asarray(tables[number])[pages], 0] = _vectors(label, field, source)


Scales = dict[tuple[str, int], int]


def _layer(memory: NDArray[np.uint8], field: Field, place: int, pages: int) -> NDArray[np.uint8]:
    """View a field of one layer as [page, token, plane, unit, byte], in place."""
    return np.lib.stride_tricks.as_strided(
        memory[field.base + place * field.layer :],
        shape=(pages, field.tokens or 1, field.planes, field.count, field.item),
        strides=(field.page, field.token, field.plane, field.unit, 1),
    )


def _vectors(label: str, field: Field, which: NDArray[Any]) -> NDArray[np.uint8]:
    """Make vectors [token, plane, unit, byte] of a field, for these tokens (or pages)."""
    base = np.uint64(int.from_bytes(blake2b(label.encode(), digest_size=8).digest(), "little"))
    units = np.arange(field.first, field.first + field.count, dtype=np.uint64)
    planes = np.arange(field.planes, dtype=np.uint64)
    place = (which.astype(np.uint64)[:, None, None] * np.uint64(4099) + units) * np.uint64(2) + planes[:, None]
    mixed = (base + place * _SPREAD) * _STEP
    mixed ^= mixed >> np.uint64(29)
    mixed *= _SPREAD
    words = mixed[..., None] + np.arange(-(-field.item // 8), dtype=np.uint64) * _STEP
    return words.view(np.uint8)[..., : field.item]


def count_wrong(found: NDArray[np.uint8], wanted: NDArray[np.uint8]) -> int:
    """Count bytes that differ."""
    wrong = 0
    for start in range(0, len(wanted), _SLICE):
        wrong += int(np.count_nonzero(found[start : start + _SLICE] != wanted[start : start + _SLICE]))
    return wrong
