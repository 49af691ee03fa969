"""Arithmetic on many boxes at once. A box is `start` and `size`, int64 arrays of shape [n, D]."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ints", "intersect", "join", "overlap", "ragged", "refine", "unique_rows", "volume"]

Ints = NDArray[np.int64]
CHUNK = 1 << 21  #: candidate pairs looked at together: bounds the memory


def volume(size: Ints) -> Ints:
    """Return the elements of each box, [n]."""
    found: Ints = np.prod(size, axis=1, dtype=np.int64)
    return found


def ragged(counts: Ints) -> tuple[Ints, Ints]:
    """For counts [3, 1] return ([0, 0, 0, 1], [0, 1, 2, 0]): the owner of each item, and its number there."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner), dtype=np.int64) - first[owner]


def chunks(counts: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield `ragged(counts)` in parts of at most CHUNK items, or of one owner that has more."""
    ends = np.cumsum(counts)
    begin = 0
    while begin < len(counts):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + CHUNK, "right")))
        owner, item = ragged(counts[begin:end])
        yield owner + begin, item
        begin = end


def join(left: Ints, right: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield all pairs (i, j) with left[i] == right[j], in chunks; `right` is sorted."""
    low = np.searchsorted(right, left, "left")
    counts = np.searchsorted(right, left, "right") - low
    for owner, item in chunks(counts):
        yield owner, low[owner] + item


def intersect(a_start: Ints, a_size: Ints, b_start: Ints, b_size: Ints) -> tuple[Ints, Ints]:
    """Return the common box of each pair; its size is 0 on an axis where there is none."""
    start = np.maximum(a_start, b_start)
    return start, np.maximum(np.minimum(a_start + a_size, b_start + b_size) - start, 0)


def unique_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """Return (a row of each distinct one, in sorted order; for each row the number of its distinct one).

    Columns are [n] or [n, D], and are compared from left to right.
    """
    keys = np.column_stack(columns)
    order = np.lexsort(keys.T[::-1])
    rows = keys[order]
    new = np.ones(len(rows), dtype=bool)
    if len(rows):
        new[1:] = np.any(rows[1:] != rows[:-1], axis=1)
    inverse = np.empty(len(rows), dtype=np.int64)
    inverse[order] = np.cumsum(new) - 1
    return order[new], inverse


def overlap(group: Ints, start: Ints, size: Ints) -> tuple[int, int] | None:
    """Return two boxes of one group that have an element in common, or None. Empty boxes have none.

    Sorted along one axis, a box is compared with those that begin before it ends: the axis is taken that leaves least.
    """
    full = np.flatnonzero((size > 0).all(axis=1))
    if len(full) < 2:
        return None
    group, start, size = group[full], start[full], size[full]
    numbers = np.unique(group, return_inverse=True)[1].astype(np.int64)
    best: tuple[int, Ints, Ints] | None = None
    for axis in range(start.shape[1]):
        span = int((start[:, axis] + size[:, axis]).max()) + 1
        key = numbers * span + start[:, axis]
        order = np.argsort(key, kind="stable")
        until = np.searchsorted(key[order], (key + size[:, axis])[order], "left")
        counts = until - np.arange(len(order)) - 1
        total = int(counts.sum())
        if best is None or total < best[0]:
            best = (total, order, counts)
    assert best is not None
    _total, order, counts = best
    for owner, item in chunks(counts):
        i, j = order[owner], order[owner + 1 + item]
        both = intersect(start[i], size[i], start[j], size[j])[1]
        hit = np.flatnonzero((both > 0).all(axis=1))
        if len(hit):
            return int(full[i[hit[0]]]), int(full[j[hit[0]]])
    return None


def refine(start: Ints, size: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut boxes that overlap along each other's faces: returns (box each piece is of, start, size).

    Afterwards two pieces are the same box or have nothing in common.
    """
    owner = np.arange(len(start), dtype=np.int64)
    for axis in range(start.shape[1]):
        cuts = np.unique(np.concatenate([start[:, axis], start[:, axis] + size[:, axis]]))
        first = np.searchsorted(cuts, start[:, axis], "left")
        last = np.searchsorted(cuts, start[:, axis] + size[:, axis], "left")
        of, item = ragged(last - first)
        begin = cuts[first[of] + item]
        start, size, owner = start[of].copy(), size[of].copy(), owner[of]
        start[:, axis], size[:, axis] = begin, cuts[first[of] + item + 1] - begin
    return owner, start, size
