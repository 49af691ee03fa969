"""A 64-bit sum over elements, each weighted by its place: whoever adds up parts, in any order, gets the whole's.

sum of (value + 1) * weight(index) mod 2**64, where the value is the element's bits, the index counts elements from the
tensor's begin, and weight is an odd number that looks random. It finds lost, swapped, doubled and stale pieces; it is
no defence against somebody who wants to deceive.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fabric_rlweights.boxes import Ints
from fabric_rlweights.dtypes import bits_of
from fabric_rlweights.moves import pages

__all__ = ["MASK", "box_digest", "run_digest"]

MASK = (1 << 64) - 1
_CHUNK = 1 << 15  #: elements: the temporary arrays stay in the cache


def _weights(index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A finaliser in the manner of splitmix64, made odd."""
    w = index * np.uint64(0x9E3779B97F4A7C15)
    w ^= w >> np.uint64(31)
    w *= np.uint64(0xD6E8FEB86659FD93)
    w ^= w >> np.uint64(32)
    return w | np.uint64(1)


def run_digest(data: NDArray[np.uint8], item: int, index: Ints) -> int:
    """Return the sum over runs: `data` is [runs, bytes], `index` where each run's first element is in its tensor."""
    bits = data.view(bits_of(item))
    runs, length = bits.shape
    total = 0
    rows = max(1, _CHUNK // max(length, 1))
    for top in range(0, runs, rows):
        for left in range(0, length, _CHUNK):
            part = bits[top : top + rows, left : left + _CHUNK].astype(np.uint64)
            part += np.uint64(1)
            first = index[top : top + rows].astype(np.uint64)[:, None] + np.uint64(left)
            part *= _weights(np.add(first, np.arange(part.shape[1], dtype=np.uint64), dtype=np.uint64))
            total += int(part.sum(dtype=np.uint64))
    return total & MASK


def box_digest(
    memory: NDArray[np.uint8], offset: int, size: tuple[int, ...], strides: tuple[int, ...], item: int
) -> int:
    """Return the sum over a box of a tensor whose bytes are `memory` [n]; offset and strides in bytes."""
    run, (places,) = pages(size, item, strides)
    total = 0
    for place in (places + offset).tolist():
        total += run_digest(memory[place : place + run].reshape(1, run), item, np.array([place // item], np.int64))
    return total & MASK
