"""What the trainers hold, as cells: disjoint boxes of parameters, each with the ranks that hold it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from fabric_rlweights.boxes import Ints, overlap, refine, unique_rows
from fabric_rlweights.columns import Held

__all__ = ["Cells", "make_cells"]


@dataclass
class Cells:
    """Cells in the order of their parameters. Cell c is held by the rows first[c] to first[c + 1] of `held`."""

    param: Ints
    start: Ints
    size: Ints
    first: Ints  #: [n + 1]
    held: Held


def make_cells(held: Held) -> Cells:
    """Return the cells. Boxes that overlap without being equal (replicated heads, say) are cut until they do not."""
    if overlap(*_distinct(held)) is not None:
        held = _cut(held)
    order = np.lexsort((held.rank, *held.size.T[::-1], *held.start.T[::-1], held.param))
    held = held.take(order)
    _once, number = unique_rows(held.param, held.start, held.size, held.rank)
    keep = np.ones(len(held), dtype=bool)  # a rank that holds a box twice sends one of them
    keep[1:] = number[1:] != number[:-1]
    held = held.take(keep)
    rows, cell = unique_rows(held.param, held.start, held.size)
    first = np.append(np.searchsorted(cell, np.arange(len(rows)), "left"), len(held)).astype(np.int64)
    return Cells(held.param[rows], held.start[rows], held.size[rows], first, held)


def _distinct(held: Held) -> tuple[Ints, Ints, Ints]:
    rows, _number = unique_rows(held.param, held.start, held.size)
    return held.param[rows], held.start[rows], held.size[rows]


def _cut(held: Held) -> Held:
    """Cut the boxes of each parameter whose boxes overlap."""
    order = np.argsort(held.param, kind="stable")
    bounds = np.flatnonzero(np.diff(held.param[order], prepend=-1, append=-2))
    parts = []
    for begin, end in itertools.pairwise(bounds):
        part = held.take(order[begin:end])
        distinct = _distinct(part)
        if overlap(*distinct) is not None:
            of, start, size = refine(part.start, part.size)
            cut = part.take(of)
            cut.offset = cut.offset + ((start - cut.start) * cut.stride).sum(axis=1)
            cut.start, cut.size = start, size
            part = cut
        parts.append(part)
    return Held.concat(parts)
