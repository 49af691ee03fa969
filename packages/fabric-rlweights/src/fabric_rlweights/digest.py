"""A 64-bit sum over elements, each weighted by its place: whoever adds up parts, in any order, gets the whole's.

sum of (value + 1) * weight(index) mod 2**64, where the value is the element's bits, the index counts elements from the
tensor's begin, and weight is an odd number that looks random. It finds lost, swapped, doubled and stale pieces; it is
no defence against somebody who wants to deceive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_rlweights.boxes import Ints
from fabric_rlweights.dtypes import bits_of
from fabric_rlweights.moves import pages
from fabric_rlweights.views import on_gpu

__all__ = ["MASK", "Sums", "box_digest", "run_digest"]

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


class Sums:
    """Digests of tensors, added up run by run. What lies on a GPU is summed there, and asked for at the end."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {}
        self._on_gpu: dict[tuple[int, int], Any] = {}

    def add(self, owner: int, tensor: int, memory: Any, places: Ints, targets: Ints, run: int, item: int) -> None:
        """Add runs of `run` bytes at `places` [n] in `memory`; `targets` [n]: where in the tensor. In bytes."""
        key = owner, tensor
        if on_gpu(memory):
            from fabric_rlweights.digest_torch import runs_digest

            part = runs_digest(memory, item, places, targets // item, run)
            self._on_gpu[key] = self._on_gpu[key] + part if key in self._on_gpu else part
            return
        total = self._known.get(key, 0)
        for here, there in zip(places.tolist(), targets.tolist(), strict=True):
            total += run_digest(memory[here : here + run].reshape(1, run), item, np.array([there // item], np.int64))
        self._known[key] = total & MASK

    def result(self) -> dict[int, dict[int, int]]:
        """Return owner -> tensor -> digest."""
        found: dict[int, dict[int, int]] = {}
        for key in self._known.keys() | self._on_gpu.keys():
            total = self._known.get(key, 0) + (int(self._on_gpu[key]) if key in self._on_gpu else 0)
            found.setdefault(key[0], {})[key[1]] = total & MASK
        return found


def box_digest(memory: Any, offset: int, size: tuple[int, ...], strides: tuple[int, ...], item: int) -> int:
    """Return the sum over a box of a tensor whose bytes are `memory` [n]; offset and strides in bytes."""
    run, (places,) = pages(size, item, strides)
    sums = Sums()
    sums.add(0, 0, memory, places + offset, places + offset, run, item)
    return sums.result()[0][0]
