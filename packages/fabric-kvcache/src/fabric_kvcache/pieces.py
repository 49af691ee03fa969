"""From a range of tokens to the pieces that move: (source offset, destination offset, length), all by numpy.

Tokens are cut where a page begins on either side. What lies between two cuts is a box [plane][unit][token] with strides
on each side; axes that lie densely on both sides become part of the piece, the others enumerate pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_kvcache.shard import Field

__all__ = ["Pieces", "Table", "box", "cut", "merge", "of_pages", "of_tokens"]

Offsets = NDArray[np.int64]
Table = NDArray[Any]  #: page number in the pool, by page number in the request


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parallel arrays."""

    src: Offsets
    dst: Offsets
    length: Offsets

    @staticmethod
    def join(parts: list[Pieces]) -> Pieces:
        if not parts:
            return Pieces(*(np.empty(0, np.int64) for _ in range(3)))
        if len(parts) == 1:
            return parts[0]
        return Pieces(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("src", "dst", "length")))


def box(src: Field, dst: Field, first: int, count: int, tokens: int) -> tuple[int, Offsets, Offsets]:
    """Return (length, source offsets, destination offsets) of `count` units and `tokens` tokens in a page of each side.

    Offsets count from the first of these tokens; `first` is the model's number of the first unit.
    """
    axes = [
        (src.planes, src.plane, dst.plane),
        (count, src.unit, dst.unit),
        (tokens, src.token, dst.token),
    ]
    axes = [axis for axis in axes if axis[0] > 1]
    length = src.item
    while True:
        dense = next((axis for axis in axes if axis[1] == axis[2] == length), None)
        if dense is None:
            break
        axes.remove(dense)
        length *= dense[0]
    s = np.array([(first - src.first) * src.unit], np.int64)
    d = np.array([(first - dst.first) * dst.unit], np.int64)
    for extent, src_stride, dst_stride in axes:
        steps = np.arange(extent, dtype=np.int64)
        s = np.add.outer(s, steps * src_stride).reshape(-1)
        d = np.add.outer(d, steps * dst_stride).reshape(-1)
    return length, s, d


def cut(first: int, end: int, *page_tokens: int) -> tuple[Offsets, Offsets]:
    """Return (first token, tokens) of the parts of a range which lie in one page of every side."""
    marks = [np.array([first, end], np.int64)]
    marks += [np.arange(first // size * size + size, end, size, dtype=np.int64) for size in page_tokens]
    cuts = np.unique(np.concatenate(marks))
    return cuts[:-1], np.diff(cuts)


def of_tokens(
    src: Field, dst: Field, units: tuple[int, int], tokens: tuple[int, int], tables: tuple[Table, Table]
) -> Pieces:
    """Return the pieces of a field with tokens, in layer 0 of both pools."""
    starts, sizes = cut(*tokens, src.tokens, dst.tokens)
    parts = []
    for size in np.unique(sizes):
        chosen = starts[sizes == size]
        length, s, d = box(src, dst, *units, int(size))
        a = src.base + tables[0][chosen // src.tokens] * src.page + chosen % src.tokens * src.token
        b = dst.base + tables[1][chosen // dst.tokens] * dst.page + chosen % dst.tokens * dst.token
        parts.append(_spread(a, b, s, d, length))
    return Pieces.join(parts)


def of_pages(src: Field, dst: Field, units: tuple[int, int], src_pages: Offsets, dst_pages: Offsets) -> Pieces:
    """Return the pieces of a field with one item per page: from these pages of the pool to those, in layer 0."""
    length, s, d = box(src, dst, *units, 1)
    return _spread(src.base + src_pages * src.page, dst.base + dst_pages * dst.page, s, d, length)


def _spread(a: Offsets, b: Offsets, s: Offsets, d: Offsets, length: int) -> Pieces:
    src = np.add.outer(a, s).reshape(-1)
    dst = np.add.outer(b, d).reshape(-1)
    return Pieces(src, dst, np.full(len(src), length, np.int64))


def merge(pieces: Pieces) -> Pieces:
    """Join pieces that follow each other on both sides: as few as possible, sorted by destination."""
    if len(pieces.dst) < 2:
        return pieces
    order = np.argsort(pieces.dst, kind="stable")
    src, dst, length = pieces.src[order], pieces.dst[order], pieces.length[order]
    apart = (src[:-1] + length[:-1] != src[1:]) | (dst[:-1] + length[:-1] != dst[1:])
    heads = np.concatenate([[0], np.flatnonzero(apart) + 1])
    return Pieces(src[heads], dst[heads], np.add.reduceat(length, heads))
