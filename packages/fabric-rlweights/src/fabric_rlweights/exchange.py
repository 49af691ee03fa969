"""Scales that cover parts of several trainer ranks: each sends the others the largest magnitudes of its part.

A block that a shard's border cuts, or a tensor with one scale, needs max(abs(x)) over all its parts. That is a float
for each block and neighbour, so nobody needs the neighbour's rows: every rank quantises and writes its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fabric_rlweights.boxes import Ints, intersect, join, unique_rows, volume
from fabric_rlweights.columns import QUANTS, Columns, Params

if TYPE_CHECKING:
    from fabric_rlweights.plan import Pieces
    from fabric_rlweights.tables import Destination

__all__ = ["Exchange", "block_boxes", "make_exchange"]


@dataclass
class Exchange(Columns):
    """Rows "the magnitudes of this piece go to that rank", sorted by sender, receiver, piece.

    They lie in that order in one buffer of the sender, and sorted by sender in one buffer of the receiver, so that each
    pair of ranks is one write.
    """

    piece: Ints
    sender: Ints
    receiver: Ints
    floats: Ints
    out: Ints  #: offset in the sender's buffer, in floats
    into: Ints  #: offset in the receiver's


def block_boxes(pieces: Pieces, destination: Destination) -> tuple[Ints, Ints]:
    """Return the boxes of blocks that each piece touches: start, size. For a scale of a tensor: one block."""
    tensor = destination.wants.tensor[pieces.want]
    block = np.maximum(destination.tensors.block[tensor], 1)[:, None]
    start, end = pieces.start.copy(), pieces.start + pieces.size
    start[:, -2:] //= block
    end[:, -2:] = -(-end[:, -2:] // block)
    whole = destination.tensors.quant[tensor] == QUANTS.index("tensor")
    return np.where(whole[:, None], 0, start), np.where(whole[:, None], 1, end - start)


def make_exchange(pieces: Pieces, rank: Ints, destination: Destination, params: Params) -> Exchange:
    """Return what has to be exchanged between trainer ranks; `rank` is each piece's."""
    start, size = block_boxes(pieces, destination)
    rows: list[tuple[Ints, Ints]] = []
    for here, there in _pairs(pieces, rank, destination, params, start, size):
        rows.append((here, rank[there]))
    piece = np.concatenate([row[0] for row in rows]) if rows else np.zeros(0, np.int64)
    to = np.concatenate([row[1] for row in rows]) if rows else np.zeros(0, np.int64)
    once, _ = unique_rows(rank[piece], to, piece)
    piece, to = piece[once], to[once]
    sender, floats = rank[piece], volume(size[piece])
    into = np.zeros(len(piece), np.int64)
    by_receiver = np.lexsort((piece, sender, to))
    into[by_receiver] = _running(floats[by_receiver], to[by_receiver])
    return Exchange(piece, sender, to, floats, _running(floats, sender), into)


def _running(floats: Ints, group: Ints) -> Ints:
    """Return the sum of what is before each row in its group; rows of a group follow each other."""
    before = np.cumsum(floats) - floats
    first = np.searchsorted(group, group, "left") if len(group) else group
    return before - before[first]


def _pairs(
    pieces: Pieces, rank: Ints, destination: Destination, params: Params, start: Ints, size: Ints
) -> Iterator[tuple[Ints, Ints]]:
    """Yield pieces (i, j) of different ranks that share a scale."""
    tensor = destination.wants.tensor[pieces.want]
    quant = destination.tensors.quant[tensor]
    whole = np.flatnonzero(quant == QUANTS.index("tensor"))
    whole = whole[np.argsort(tensor[whole], kind="stable")]
    for a, b in join(tensor[whole], tensor[whole]):
        apart = rank[whole[a]] != rank[whole[b]]
        yield whole[a[apart]], whole[b[apart]]
    cut = np.flatnonzero(quant == QUANTS.index("block"))
    if not len(cut):
        return
    block = destination.tensors.block[tensor[cut]]
    shape = params.shape[destination.wants.param[pieces.want[cut]]]
    for axis in (-2, -1):
        first, end = pieces.start[cut, axis], pieces.start[cut, axis] + pieces.size[cut, axis]
        low = first % block != 0
        high = (end % block != 0) & (end != shape[:, axis])
        line = np.concatenate([(first // block)[low], (end // block)[high]])
        piece = np.concatenate([cut[low], cut[high]])
        if not len(piece):
            continue
        key = unique_rows(pieces.want[piece], line)[1]
        order = np.argsort(key, kind="stable")
        piece, key = piece[order], key[order]
        for a, b in join(key, key):
            i, j = piece[a], piece[b]
            both = intersect(start[i], size[i], start[j], size[j])[1]
            keep = (rank[i] != rank[j]) & (both > 0).all(axis=1)
            yield i[keep], j[keep]
