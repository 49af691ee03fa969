"""Small random worlds, and what must be in every destination tensor: from whole parameters, without any plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fabric_rlweights.dtypes import itemsize_of
from fabric_rlweights.meta import EngineTable, Entry, Shard, Tensor, TrainerTable, contiguous

Bits = NDArray[np.unsignedinteger]


@dataclass
class World:
    """Whole parameters (bits of their type), who holds what, who wants what."""

    params: dict[str, tuple[str, Bits]]
    trainers: list[TrainerTable]
    buffers: list[list[NDArray[np.uint8]]]
    engines: list[EngineTable]

    def expected(self, engine: EngineTable) -> dict[str, Bits]:
        """What a load of the whole parameters puts into each tensor; 0xFF where nothing goes."""
        found: dict[str, Bits] = {}
        for tensor in engine.tensors:
            item = itemsize_of(tensor.dtype)
            found[tensor.name] = np.full(tensor.shape, (1 << 8 * item) - 1, f"<u{item}")
        for entry in engine.entries:
            _dtype, whole = self.params[entry.param]
            box = whole[tuple(slice(a, a + n) for a, n in zip(entry.start, entry.size, strict=True))]
            target = found[entry.tensor]
            n = len(entry.start)
            axes = entry.axes or tuple(range(target.ndim - n, target.ndim))
            kept = [axis for axis in range(n) if axes[axis] >= 0]
            box = box.reshape([entry.size[axis] for axis in kept])
            box = box.transpose(np.argsort([axes[axis] for axis in kept]))
            extent = [1] * target.ndim
            for axis in kept:
                extent[axes[axis]] = entry.size[axis]
            target[tuple(slice(a, a + m) for a, m in zip(entry.at, extent, strict=True))] = box.reshape(extent)
        return found


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Bits:
    """Random finite numbers, as bits."""
    if dtype == "bfloat16":
        values = rng.standard_normal(shape).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "float32":
        return rng.standard_normal(shape).astype(np.float32).view(np.uint32)
    item = itemsize_of(dtype)
    return rng.integers(0, 1 << 8 * item, shape, dtype=np.uint64).astype(f"<u{item}")


def shard(
    name: str, dtype: str, whole: Bits, start: tuple[int, ...], size: tuple[int, ...], buffers: list[NDArray[np.uint8]]
) -> Shard:
    """Put a box into a buffer of its own, and describe it."""
    box = np.ascontiguousarray(whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))])
    buffers.append(box.reshape(-1).view(np.uint8).copy() if box.size else np.zeros(0, np.uint8))
    return Shard(
        param=name, shape=whole.shape, dtype=dtype, start=start, size=size, buffer=len(buffers) - 1, offset=0,
        strides=contiguous(size, itemsize_of(dtype)),
    )  # fmt: skip


def plain(name: str, shape: tuple[int, ...], dtype: str, **more: object) -> Tensor:
    """A contiguous tensor."""
    return Tensor(name=name, shape=shape, strides=contiguous(shape, itemsize_of(dtype)), dtype=dtype, **more)  # type: ignore[arg-type]


def place(param: str, tensor: str, start: tuple[int, ...], size: tuple[int, ...], at: tuple[int, ...]) -> Entry:
    """An entry with the same axes on both sides."""
    return Entry(param=param, start=start, size=size, tensor=tensor, at=at)
