"""Hypothesis strategies: random models on random meshes, and inference ranks that cut and fuse them otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from oracle import World, random_bits, shard

from fabric_rlweights.dtypes import itemsize_of
from fabric_rlweights.meta import EngineTable, Entry, Tensor, TrainerTable

__all__ = ["chunk", "worlds"]


def chunk(count: int, parts: int, index: int) -> tuple[int, int]:
    """(first, size) as torch.chunk cuts: all parts as long as the first, the last ones shorter or empty."""
    step = -(-count // parts)
    first = min(index * step, count)
    return first, min(step, count - first)


def _boxes(shape: tuple[int, ...], mesh: tuple[int, ...], axes: list[int | None], order: list[int]) -> list[Any]:
    """The box of each rank of a mesh: mesh dimension d cuts axes[d] (None: replicas), in that order."""
    found = []
    for rank in range(int(np.prod(mesh))):
        at = np.unravel_index(rank, mesh)
        start, size = [0] * len(shape), list(shape)
        for d in order:
            axis = axes[d]
            if axis is not None:
                first, count = chunk(size[axis], mesh[d], int(at[d]))
                start[axis] += first
                size[axis] = count
        found.append((tuple(start), tuple(size)))
    return found


@st.composite
def worlds(draw: Any) -> World:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (3, 2), (2, 1, 2)]))
    ranks = int(np.prod(mesh))
    stages = draw(st.integers(1, 2))  # pipeline stages: each has the whole mesh
    width = draw(st.integers(1, 40))
    params: dict[str, tuple[str, Any]] = {}
    shards: list[list[Any]] = [[] for _ in range(ranks * stages)]
    buffers: list[list[Any]] = [[] for _ in range(ranks * stages)]
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.sampled_from([(draw(st.integers(1, 12)), width), (draw(st.integers(1, 50)),), (3, 5, width)]))
        dtype = draw(st.sampled_from(["bfloat16", "float32", "uint8"]))
        name, whole = f"p{number}", random_bits(rng, shape, dtype)
        params[name] = (dtype, whole)
        axes = [draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]
        order = draw(st.permutations(range(len(mesh))))  # FSDP over TP cuts the later mesh dimension first
        stage = draw(st.integers(0, stages - 1))
        for rank, (start, size) in enumerate(_boxes(shape, mesh, axes, order)):
            own = stage * ranks + rank
            shards[own].append(shard(name, dtype, whole, start, size, buffers[own]))
        if draw(st.booleans()):  # somebody holds another box too, which overlaps the others
            start = tuple(draw(st.integers(0, n - 1)) for n in shape)
            size = tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
            own = draw(st.integers(0, ranks * stages - 1))
            shards[own].append(shard(name, dtype, whole, start, size, buffers[own]))
    trainers = [TrainerTable(rank=rank, shards=tuple(rows)) for rank, rows in enumerate(shards)]
    engines = [_engine(draw, rank, params) for rank in range(draw(st.integers(1, 3)))]
    return World(params, trainers, buffers, engines)


def _engine(draw: Any, rank: int, params: dict[str, tuple[str, Any]]) -> EngineTable:
    """Every parameter, or a slice of it, in some tensor: by itself, transposed, with gaps, or fused with its like."""
    tensors, entries = [], []
    fused: dict[Any, list[Entry]] = {}
    for name, (dtype, whole) in params.items():
        axis = draw(st.integers(0, whole.ndim - 1))
        parts = draw(st.integers(1, 3))
        first, count = chunk(whole.shape[axis], parts, draw(st.integers(0, parts - 1)))
        if count == 0:
            continue
        start, size = [0] * whole.ndim, list(whole.shape)
        start[axis], size[axis] = first, count
        entry = Entry(param=name, start=tuple(start), size=tuple(size), tensor=name, at=(0,) * whole.ndim)
        if draw(st.booleans()):
            fused.setdefault((dtype, tuple(size[1:])), []).append(entry)
            continue
        axes = tuple(draw(st.permutations(range(whole.ndim))))
        shape = tuple(size[axes.index(k)] for k in range(whole.ndim))
        tensors.append(_tensor(draw, name, shape, dtype))
        entries.append(entry.model_copy(update={"axes": axes}))
    for (dtype, rest), rows in fused.items():
        name, at = f"fused{len(tensors)}", 0
        for entry in rows:
            entries.append(entry.model_copy(update={"tensor": name, "at": (at,) + (0,) * len(rest)}))
            at += entry.size[0]
        tensors.append(_tensor(draw, name, (at, *rest), dtype))
    if not tensors:
        name, (dtype, whole) = next(iter(params.items()))
        tensors.append(_tensor(draw, name, whole.shape, dtype))
        zeros = (0,) * whole.ndim
        entries.append(Entry(param=name, start=zeros, size=whole.shape, tensor=name, at=zeros))
    return EngineTable(rank=rank, tensors=tuple(tensors), entries=tuple(entries))


def _tensor(draw: Any, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    step, strides = itemsize_of(dtype), []
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
        step += itemsize_of(dtype) * draw(st.sampled_from([0, 0, 0, 3]))  # rows that are padded
    return Tensor(name=name, shape=shape, strides=tuple(reversed(strides)), dtype=dtype)
