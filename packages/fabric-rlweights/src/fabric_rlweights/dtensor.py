"""A trainer's table from what torch has: plain tensors, and DTensors of FSDP2, HSDP, TP, EP in any combination.

    table, buffers = table_of(dist.get_rank(), model.state_dict())

Where a rank's part of a parameter lies is worked out from mesh and placements, axis by axis as torch cuts them: plain
shards from the left to the right; `_StridedShard` afterwards and from the right to the left, because it says that FSDP
cut what TP had cut before. Uneven cuts leave shorter parts, or none. A part that is not one box becomes several.
Whether all ranks' boxes make up the parameter is checked once more by the planner's proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fabric_core import ConfigError
from fabric_rlweights.boxes import Ints
from fabric_rlweights.dtypes import name_of
from fabric_rlweights.meta import Shard, TrainerTable, contiguous

__all__ = ["local_indices", "table_of"]

Box = tuple[tuple[int, ...], tuple[int, ...]]


def table_of(
    rank: int,
    state: Mapping[str, Any],
    *,
    rename: Callable[[str], str] | None = None,
    boxes: Mapping[str, tuple[Box, tuple[int, ...]]] | None = None,
) -> tuple[TrainerTable, list[Any]]:
    """Return this rank's table, and the buffers that its shards lie in, for `Trainer`.

    Args:
        state: name -> torch tensor, DTensor, or numpy array. PP: what this stage has.
        rename: from the trainer's names to those that the inference side uses.
        boxes: for plain tensors that are parts: name -> ((start, size), shape of the whole).

    Raises ConfigError for partial DTensors, and for parts that are not where they should be.
    """
    shards: list[Shard] = []
    buffers: list[Any] = []
    for name, value in state.items():
        public = rename(name) if rename else name
        shape, local, indices = _part(name, value, (boxes or {}).get(name))
        if 0 in tuple(local.shape):
            continue
        if hasattr(local, "is_contiguous") and not local.is_contiguous():
            raise ConfigError(f"{name}: the local part of {tuple(local.shape)} is not contiguous in memory")
        dtype = name_of(local.dtype)
        item = int(local.element_size() if hasattr(local, "element_size") else local.itemsize)
        strides = contiguous(tuple(local.shape), item)
        for start, size, at in _boxes(indices):
            offset = sum(place * stride for place, stride in zip(at, strides, strict=True))
            shards.append(
                Shard(
                    param=public, shape=shape, dtype=dtype, start=start, size=size, buffer=len(buffers), offset=offset,
                    strides=strides,
                )
            )  # fmt: skip
        buffers.append(local.detach() if hasattr(local, "detach") else local)
    return TrainerTable(rank=rank, shards=tuple(shards)), buffers


def _part(name: str, value: Any, box: tuple[Box, tuple[int, ...]] | None) -> tuple[tuple[int, ...], Any, list[Ints]]:
    """Return (shape of the whole, local tensor, for each axis the indices in the whole that it holds)."""
    if hasattr(value, "placements"):
        if box is not None:
            raise ConfigError(f"{name} is a DTensor, which knows its box: leave it out of boxes=")
        local, shape = value.to_local(), tuple(value.shape)
        indices = local_indices(name, shape, tuple(value.device_mesh.shape), value.placements, _coordinate(name, value))
    else:
        local = value
        (start, size), shape = box if box is not None else (((0,) * len(value.shape), value.shape), tuple(value.shape))
        indices = [np.arange(a, a + n, dtype=np.int64) for a, n in zip(start, size, strict=True)]
    held = tuple(len(index) for index in indices)
    if held != tuple(local.shape):
        raise ConfigError(f"{name}: its placements say that this rank holds {held}, it holds {tuple(local.shape)}")
    return shape, local, indices


def _coordinate(name: str, value: Any) -> tuple[int, ...]:
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"{name}: this rank is not part of the mesh {value.device_mesh}")
    return tuple(coordinate)


def local_indices(
    name: str, shape: tuple[int, ...], mesh: tuple[int, ...], placements: Any, at: tuple[int, ...]
) -> list[Ints]:
    """Return for each axis of a parameter the indices that the rank at coordinate `at` of the mesh holds, in order."""
    indices = [np.arange(extent, dtype=np.int64) for extent in shape]
    plain: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    for d, placement in enumerate(placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        axis = getattr(placement, "dim", None)
        if axis is None or kind not in ("Shard", "_StridedShard"):
            raise ConfigError(
                f"{name}: {placement} is no placement that weights can be sent from; redistribute it first"
            )
        (strided if kind == "_StridedShard" else plain).append((d, axis % len(shape)))
    for d, axis in [*plain, *reversed(strided)]:
        step = -(-len(indices[axis]) // mesh[d])
        indices[axis] = indices[axis][at[d] * step : (at[d] + 1) * step]
    return indices


def _boxes(indices: list[Ints]) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Return (start in the whole, size, place in the local part) of the boxes that index lists make up."""
    found: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [((), (), ())]
    for index in indices:
        cuts = np.flatnonzero(np.diff(index) != 1) + 1
        firsts = [0, *cuts.tolist()]
        runs = [(int(index[a]), b - a, a) for a, b in zip(firsts, [*firsts[1:], len(index)], strict=True)]
        found = [((*s, start), (*n, size), (*p, place)) for s, n, p in found for start, size, place in runs]
    return found
