"""The check of a plan: every element of every destination tensor is written exactly once, or left alone.

Three statements make that up, each checked on all rows:

1. what is wanted in a tensor, and what is left alone there, are boxes inside it with nothing in common whose volumes
   add up to the tensor's; its strides give every element its own bytes; and no two tensors of a rank share a byte;
2. the pieces of a want are boxes inside it with nothing in common whose volumes add up to the want's;
3. the same for scales: the blocks that pieces write are those of the want, each once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fabric_core import ConfigError
from fabric_rlweights.boxes import Ints, overlap, volume
from fabric_rlweights.columns import LAYOUTS, QUANTS, Params

if TYPE_CHECKING:
    from fabric_rlweights.cells import Cells
    from fabric_rlweights.plan import Pieces
    from fabric_rlweights.tables import Destination

__all__ = ["Proof", "prove"]


@dataclass(frozen=True)
class Proof:
    """What was checked."""

    tensors: int
    elements: int  #: of all destination tensors, scales too
    left_alone: int
    bytes: dict[str, int]  #: by layout class: direct, staging, fallback
    pieces: int


def prove(params: Params, cells: Cells, destination: Destination, pieces: Pieces, without: frozenset[int]) -> Proof:
    """Check everything. Raises ConfigError naming tensor, rank and parameter for the first thing that is wrong."""
    _strides(destination)
    _memory(destination)
    _pieces(params, destination, pieces, without)
    return _tensors(destination, pieces)


def _name(destination: Destination, tensor: int) -> str:
    return f"rank {int(destination.tensors.rank[tensor])}: {destination.tensors.names[tensor]}"


def _items(destination: Destination) -> Ints:
    from fabric_rlweights.plan import ITEMSIZES

    return ITEMSIZES[destination.tensors.dtype]


def _strides(destination: Destination) -> None:
    """Sorted by stride, each axis must step over everything inside it."""
    tensors = destination.tensors
    order = np.argsort(np.where(tensors.shape > 1, tensors.stride, 0), axis=1, kind="stable")
    extent = np.take_along_axis(tensors.shape, order, axis=1)
    stride = np.take_along_axis(tensors.stride, order, axis=1)
    reach = _items(destination).copy()
    for axis in range(extent.shape[1]):
        wide = extent[:, axis] > 1
        bad = np.flatnonzero(wide & (stride[:, axis] < reach))
        if len(bad):
            raise ConfigError(f"{_name(destination, bad[0])}: its strides put two elements on the same bytes")
        reach = np.where(wide, reach + (extent[:, axis] - 1) * stride[:, axis], reach)


def _memory(destination: Destination) -> None:
    tensors = destination.tensors
    known = np.flatnonzero(tensors.address > 0)
    order = known[np.lexsort((tensors.address[known], tensors.rank[known]))]
    end = tensors.address[order] + tensors.nbytes[order]
    bad = np.flatnonzero(
        (tensors.rank[order][1:] == tensors.rank[order][:-1]) & (tensors.address[order][1:] < end[:-1])
    )
    if len(bad):
        one, other = order[bad[0]], order[bad[0] + 1]
        raise ConfigError(
            f"{_name(destination, one)} and {destination.tensors.names[other]} overlap in memory without being the same"
        )


def _pieces(params: Params, destination: Destination, pieces: Pieces, without: frozenset[int]) -> None:
    wants = destination.wants
    low, high = wants.start[pieces.want], wants.start[pieces.want] + wants.size[pieces.want]
    if ((pieces.start < low) | (pieces.start + pieces.size > high)).any():
        raise AssertionError("a piece leaves its want: a defect of the planner")
    clash = overlap(pieces.want, pieces.start, pieces.size)
    if clash is not None:
        raise AssertionError(f"pieces {clash[0]} and {clash[1]} write the same elements: a defect of the planner")
    have = np.bincount(pieces.want, weights=volume(pieces.size), minlength=len(wants)).astype(np.int64)
    short = np.flatnonzero(have != volume(wants.size))
    if len(short):
        want = int(short[0])
        name = params.names[int(wants.param[want])]
        lost = f" (without the lost ranks {sorted(without)})" if without else ""
        raise ConfigError(
            f"{_name(destination, int(wants.tensor[want]))} wants {int(volume(wants.size[[want]])[0])} elements of "
            f"{name} from {wants.start[want].tolist()}, of which the trainers hold {int(have[want])}{lost}; "
            f"{len(short)} boxes are short"
        )


def _tensors(destination: Destination, pieces: Pieces) -> Proof:
    tensors, wants = destination.tensors, destination.wants
    keep_tensor, keep_at, keep_size = destination.keep
    scale_tensor, scale_at, scale_size = _scales(destination, pieces)
    tensor = np.concatenate([wants.tensor, keep_tensor, scale_tensor])
    at = np.concatenate([wants.at, keep_at, scale_at])
    size = np.concatenate([wants.extent, keep_size, scale_size])
    if ((at < 0) | (at + size > tensors.shape[tensor])).any():
        bad = int(np.flatnonzero(((at < 0) | (at + size > tensors.shape[tensor])).any(axis=1))[0])
        raise ConfigError(f"{_name(destination, int(tensor[bad]))}: a box at {at[bad].tolist()} leaves it")
    clash = overlap(tensor, at, size)
    if clash is not None:
        one, other = clash
        raise ConfigError(
            f"{_name(destination, int(tensor[one]))}: two things go to one place, the boxes {at[one].tolist()} + "
            f"{size[one].tolist()} and {at[other].tolist()} + {size[other].tolist()}"
        )
    filled = np.bincount(tensor, weights=volume(size), minlength=len(tensors)).astype(np.int64)
    whole = volume(tensors.shape)
    short = np.flatnonzero(filled != whole)
    if len(short):
        bad = int(short[0])
        raise ConfigError(
            f"{_name(destination, bad)}: of {int(whole[bad])} elements {int(filled[bad])} are spoken for; say with "
            f"`keep` what is padding ({len(short)} tensors are short)"
        )
    nbytes = whole * _items(destination)
    classes = {name: int(nbytes[tensors.layout == k].sum()) for k, name in enumerate(LAYOUTS)}
    return Proof(len(tensors), int(whole.sum()), int(volume(keep_size).sum()), classes, len(pieces))


def _scales(destination: Destination, pieces: Pieces) -> tuple[Ints, Ints, Ints]:
    """Return the boxes of scales that are written, after a check of who writes them."""
    from fabric_rlweights.plan import BLOCK, PER_TENSOR, first_want, own_blocks

    tensors, wants = destination.tensors, destination.wants
    quant = tensors.quant[wants.tensor]
    block = np.flatnonzero(quant == QUANTS.index("block"))
    width = np.maximum(tensors.block[wants.tensor[block]], 1)[:, None]
    at, size = wants.at[block].copy(), wants.extent[block].copy()
    at[:, -2:] //= width
    size[:, -2:] = -(-size[:, -2:] // width)
    of = np.where(pieces.op == BLOCK, volume(own_blocks(pieces, destination)[1]), 0)
    have = np.bincount(pieces.want, weights=of, minlength=len(wants)).astype(np.int64)[block]
    if (have != volume(size)).any():
        raise AssertionError("scales of blocks are written by nobody, or twice: a defect of the planner")
    whole = np.flatnonzero(tensors.quant == QUANTS.index("tensor"))
    count = np.bincount(
        wants.tensor[pieces.want], weights=pieces.scale_writes * (pieces.op == PER_TENSOR), minlength=len(tensors)
    )
    if (count[whole] != (first_want(destination)[whole] >= 0)).any():
        raise AssertionError("a tensor's scale is written by nobody, or twice: a defect of the planner")
    ones = np.ones((len(whole), wants.at.shape[1]), np.int64)
    tensor = np.concatenate([tensors.scales[wants.tensor[block]], tensors.scales[whole]])
    return tensor, np.concatenate([at, ones * 0]), np.concatenate([size, ones])
