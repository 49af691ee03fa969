"""Which of the ranks that hold the same bytes sends them: so that the busiest rank sends as little as possible."""

from __future__ import annotations

import heapq

import numpy as np

from fabric_rlweights.boxes import Ints

__all__ = ["choose"]

HEAP_LIMIT = 200_000  #: pieces of one set of replicas that are placed one by one; more are placed by running sums


def choose(cell: Ints, nbytes: Ints, first: Ints, rank: Ints, ranks: int) -> Ints:
    """Return for each piece the row of `held` that sends it.

    Args:
        cell: of each piece. nbytes: that it takes on the wire.
        first: cell c is held by the rows first[c] .. first[c + 1]. rank: of each of these rows.
        ranks: number of trainer ranks.

    Pieces that only one rank holds are placed first; then the sets of replicas, small ones first, each longest piece
    first to the rank with the least so far.
    """
    width = (first[1:] - first[:-1])[cell]
    row = first[cell].copy()
    load = np.bincount(rank[row[width == 1]], weights=nbytes[width == 1], minlength=ranks).astype(np.int64)
    sets: dict[bytes, list[int]] = {}
    for c in np.unique(cell[width > 1]).tolist():
        sets.setdefault(rank[first[c] : first[c + 1]].tobytes(), []).append(c)
    set_of = np.full(len(first) - 1, -1, np.int64)
    for number, cells in enumerate(sets.values()):
        set_of[cells] = number
    shared = np.flatnonzero(width > 1)
    shared = shared[np.argsort(set_of[cell[shared]], kind="stable")]
    bounds = np.searchsorted(set_of[cell[shared]], np.arange(len(sets) + 1), "left")
    members = [np.frombuffer(key, dtype=rank.dtype) for key in sets]
    for number in sorted(range(len(members)), key=lambda k: len(members[k])):
        pieces = shared[bounds[number] : bounds[number + 1]]
        pieces = pieces[np.argsort(-nbytes[pieces], kind="stable")]
        place = _heap if len(pieces) <= HEAP_LIMIT else _sums
        chosen = place(nbytes[pieces], load[members[number]])
        row[pieces] += chosen
        np.add.at(load, members[number][chosen], nbytes[pieces])
    return row


def _heap(nbytes: Ints, load: Ints) -> Ints:
    """Longest first, each to the least loaded."""
    heap = [(int(have), index) for index, have in enumerate(load)]
    heapq.heapify(heap)
    chosen = np.empty(len(nbytes), np.int64)
    for number, size in enumerate(nbytes.tolist()):
        have, index = heap[0]
        chosen[number] = index
        heapq.heapreplace(heap, (have + size, index))
    return chosen


def _sums(nbytes: Ints, load: Ints) -> Ints:
    """Fill every rank up to one common level: off by at most a piece for each rank, and without a loop over pieces."""
    order = np.argsort(load, kind="stable")
    total = int(nbytes.sum())
    rows = load[order]
    levels = (total + np.cumsum(rows)) / np.arange(1, len(rows) + 1)  # the level if the k+1 least loaded share it
    above = np.append(rows[1:], np.iinfo(np.int64).max)
    k = int(np.argmax(levels <= above))
    room = np.zeros(len(rows))
    room[: k + 1] = levels[k] - rows[: k + 1]
    middle = np.cumsum(nbytes) - nbytes / 2
    return order[np.minimum(np.searchsorted(np.cumsum(room), middle, "left"), k)]
