"""Making a piece ready: packed, cast or quantised out of a parameter into temporary memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_rlweights.arena import aligned
from fabric_rlweights.dtypes import bits_of, itemsize_of, torch_dtype
from fabric_rlweights.magnitudes import Magnitudes
from fabric_rlweights.plan import BLOCK, CAST, PER_TENSOR
from fabric_rlweights.quantise import Floats, magnitudes, quantise, scales
from fabric_rlweights.route import Route
from fabric_rlweights.tasks import Task

__all__ = ["Bytes", "Maker"]

Bytes = NDArray[np.uint8]


class Maker:
    """Knows one rank's parameters by their numbers, and the temporary memory (`room`) that results go to."""

    def __init__(self, route: Route, memory: dict[int, Bytes], room: Bytes, agreed: Magnitudes) -> None:
        """`agreed`: holds the magnitudes of blocks that several ranks share, once all have sent theirs."""
        self._route, self._memory, self._room, self._agreed = route, memory, room, agreed
        self._shared = {int(row) for row in agreed.shared}

    def needs_others(self, task: Task) -> bool:
        """Whether its scales depend on other ranks."""
        return task.row in self._shared

    def offer_magnitudes(self, task: Task) -> None:
        """Give the largest magnitudes of what this rank has of shared blocks to `agreed`."""
        found = magnitudes(self._blocks_of(task), *task.first, task.block)
        route = self._route
        same = (route.buffer == task.buffer) & (route.offset == task.offset) & (route.op == task.op)
        same &= (route.size == task.size).all(axis=1)
        for row in np.flatnonzero(same).tolist():
            if row in self._shared:
                self._agreed.put(row, found)

    def make(self, task: Task, at: int, scale_at: int) -> Bytes | None:
        """Put the result into the room at `at`; returns its scales, if any, which lie at `scale_at`."""
        out = self._room[at : at + task.nbytes]
        shape = tuple(task.size[axis] for axis in task.order)
        if task.op < CAST:
            source = self._source(task)
            np.copyto(out.view(source.dtype).reshape(shape), source.transpose(task.order))
            return None
        import torch

        result = torch.frombuffer(out, dtype=torch_dtype(task.target))
        if task.op == CAST:
            result.view(shape).copy_(self._tensor(task).permute(task.order))
            return None
        x = self._blocks_of(task)
        if self.needs_others(task):
            touched = self._route.touch_size[task.row]
            shape3 = (1, 1, 1) if task.op == PER_TENSOR else (int(np.prod(touched[:-2])), *touched[-2:].tolist())
            largest = self._agreed.largest(task.row, shape3)
        else:
            largest = magnitudes(x, *task.first, task.block)
        begin = scale_at + aligned(task.scale_bytes)
        work = torch.frombuffer(self._room[begin : begin + task.work], dtype=torch.float32)
        quantise(x, largest, result.view(tuple(x.shape)), work, *task.first, task.block)
        return self._scales(task, largest, scale_at)

    def _scales(self, task: Task, largest: Floats, scale_at: int) -> Bytes:
        """Put the scales of the blocks that this piece owns into the arena, in the destination's order."""
        row = task.row
        found = scales(largest).reshape(self._route.touch_size[row])
        if task.op == BLOCK:
            low = self._route.own_start[row] - self._route.touch_start[row]
            box = zip(low, low + self._route.own_size[row], strict=True)
            found = found[tuple(slice(max(int(a), 0), max(int(b), 0)) for a, b in box)]
        step = self._route.scale_step[row]
        order = sorted(range(found.ndim), key=lambda axis: -int(step[axis]) if found.shape[axis] > 1 else 0)
        flat = np.ascontiguousarray(found.transpose(order)).view(np.uint8).reshape(-1)
        self._room[scale_at : scale_at + len(flat)] = flat
        return self._room[scale_at : scale_at + len(flat)]

    def _source(self, task: Task) -> NDArray[Any]:
        item = itemsize_of(task.source)
        bits = self._memory[task.buffer][task.offset :]
        bits = bits[: len(bits) // item * item].view(bits_of(item))
        return np.lib.stride_tricks.as_strided(bits, task.size, task.stride, writeable=False)

    def _tensor(self, task: Task) -> Any:
        import torch

        view = self._source(task)
        item = view.itemsize
        flat = torch.frombuffer(self._memory[task.buffer], dtype=torch_dtype(task.source), offset=task.offset)
        return flat.as_strided(task.size, [step // item for step in task.stride])

    def _blocks_of(self, task: Task) -> Any:
        x = self._tensor(task)
        return x.reshape((1,) * (3 - x.ndim) + tuple(x.shape)) if x.ndim < 3 else x.reshape(x.shape[-3:])
