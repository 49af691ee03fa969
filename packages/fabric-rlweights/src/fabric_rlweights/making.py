"""Making a piece ready: packed, cast or quantised out of a parameter into temporary memory, of the host or of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_rlweights.boxes import Ints
from fabric_rlweights.dtypes import itemsize_of
from fabric_rlweights.magnitudes import Magnitudes
from fabric_rlweights.meta import contiguous
from fabric_rlweights.plan import BLOCK, CAST, PER_TENSOR
from fabric_rlweights.quantise import magnitudes, quantise
from fabric_rlweights.route import Route
from fabric_rlweights.stage import Stage
from fabric_rlweights.tasks import Target, Task
from fabric_rlweights.views import bits_view, on_gpu, torch_view

__all__ = ["Made", "Maker"]


@dataclass(frozen=True, slots=True)
class Made:
    """A piece in the room: its own scales follow each other from `scales_at` on, in the destination's order."""

    at: int
    scales_at: int
    scale_bytes: int

    def lies(self, task: Task) -> list[tuple[Target, Ints, Ints]]:
        """Return (target, where its runs lie in the room, where the runs of its scales do)."""
        found = []
        for t in task.targets:
            places = self.at + np.arange(len(t.places), dtype=np.int64) * t.run
            found.append((t, places, self.scales_at + np.arange(len(t.scale_places), dtype=np.int64) * t.scale_run))
        return found


class Maker:
    """Knows one rank's parameters by their numbers, and the stage whose room results go to."""

    def __init__(self, route: Route, memory: dict[int, Any], stage: Stage, agreed: Magnitudes) -> None:
        """`agreed`: holds the magnitudes of blocks that several ranks share, once all have sent theirs."""
        self._route, self._memory, self._stage, self._agreed = route, memory, stage, agreed
        self._shared = {int(row) for row in agreed.shared}
        self._views: dict[int, Any] = {}

    def needs_others(self, task: Task) -> bool:
        """Whether its scales depend on other ranks."""
        return task.row in self._shared

    def magnitudes_of(self, task: Task, at: int) -> Any:
        """Hand out the work for the largest magnitudes of what this rank has of a piece, for `offer`.

        `at`: where its source is fetched to, if it is.
        """
        x = self._blocks(task, self._fetched(task, at))
        with self._stage.working():
            return magnitudes(x, *task.first, task.block)

    def offer(self, found: Sequence[tuple[Task, Any]]) -> None:
        """Give what `magnitudes_of` returned to `agreed`: one copy to the host for all of them."""
        if not found:
            return
        import torch

        with self._stage.working():
            host = torch.cat([largest.reshape(-1) for _task, largest in found]).cpu().numpy()
        begin, route = 0, self._route
        for task, largest in found:
            own = host[begin : begin + largest.numel()]
            begin += largest.numel()
            same = (route.buffer == task.buffer) & (route.offset == task.offset) & (route.op == task.op)
            same &= (route.size == task.size).all(axis=1)
            same &= (route.stride == task.stride).all(axis=1) & ((route.block == task.block) | (task.op != BLOCK))
            for row in np.flatnonzero(same).tolist():
                if row in self._shared:
                    self._agreed.put(row, own)

    def make(self, task: Task, at: int) -> Made:
        """Hand out the work for a piece that begins at `at` in the room. It is there at the stage's next mark."""
        scales_at, work_at, raw_at = (at + place for place in task.places[:3])
        source = self._fetched(task, raw_at)
        with self._stage.working():
            if task.op < CAST:
                self._pack(task, source, at)
                return Made(at, scales_at, 0)
            room = self._stage.room
            if task.op == CAST:
                shape = tuple(task.size[axis] for axis in task.order)
                result = torch_view(room, task.target, at, shape, contiguous(shape, itemsize_of(task.target)))
                result.copy_(self._tensor(task, source).permute(task.order))
                return Made(at, scales_at, 0)
            x = self._blocks(task, source)
            result = torch_view(room, task.target, at, tuple(x.shape), contiguous(tuple(x.shape), 1))
            work = torch_view(room, "float32", work_at, (task.work // 4,), (4,)) if task.work else None
            into = self._scales_in_place(task, x, scales_at)
            found = quantise(x, self._largest(task, x), result, work, *task.first, task.block, into)
            own = 4 * into.numel() if into is not None else self._scales(task, found, scales_at)
            return Made(at, scales_at, own)

    def _largest(self, task: Task, x: Any) -> Any:
        """What others have of its blocks is known by now; None: nobody has anything of them."""
        if not self.needs_others(task):
            return None
        import torch

        touched = self._route.touch_size[task.row]
        shape = (1, 1, 1) if task.op == PER_TENSOR else (int(np.prod(touched[:-2])), *touched[-2:].tolist())
        # from memory that is not pinned: the driver has read it when this returns
        return torch.from_numpy(self._agreed.largest(task.row, shape)).to(x.device, non_blocking=True)

    def _order(self, task: Task, size: Sequence[int]) -> list[int]:
        """The axes of its scales as they lie at the destination, outermost first."""
        step = self._route.scale_step[task.row]
        return sorted(range(len(size)), key=lambda axis: -int(step[axis]) if size[axis] > 1 else 0)

    def _scales_in_place(self, task: Task, x: Any, at: int) -> Any:
        """Return where in the room all its scales may be written as they are made; None: they are sorted afterwards."""
        row = task.row
        size = self._route.touch_size[row].tolist()
        if task.op != BLOCK or (self._route.own_size[row] != self._route.touch_size[row]).any():
            return None
        wide = [axis for axis in self._order(task, size) if size[axis] > 1]
        if wide != sorted(wide):
            return None
        shape = (x.shape[0], *size[-2:])
        return torch_view(self._stage.room, "float32", at, shape, contiguous(shape, 4))

    def _scales(self, task: Task, found: Any, at: int) -> int:
        """Put the scales of the blocks that this piece owns into the room; returns their bytes."""
        row = task.row
        found = found.reshape(self._route.touch_size[row].tolist())
        if task.op == BLOCK:
            low = self._route.own_start[row] - self._route.touch_start[row]
            box = zip(low, low + self._route.own_size[row], strict=True)
            found = found[tuple(slice(max(int(a), 0), max(int(b), 0)) for a, b in box)]
        found = found.permute(self._order(task, found.shape))
        shape = tuple(found.shape)
        if found.numel():
            torch_view(self._stage.room, "float32", at, shape, contiguous(shape, 4)).copy_(found)
        return 4 * int(found.numel())

    def _pack(self, task: Task, source: Any, at: int) -> None:
        """Bits as they are, in the destination's order. Without torch in the host's memory: it may not be there."""
        item = itemsize_of(task.source)
        shape = tuple(task.size[axis] for axis in task.order)
        result = bits_view(self._stage.room, item, at, shape, contiguous(shape, item))
        if not on_gpu(self._stage.room):
            memory = self._memory[task.buffer]
            np.copyto(result, bits_view(memory, item, task.offset, task.size, task.stride).transpose(task.order))
            return
        if source is None:
            bits = bits_view(self._memory[task.buffer], item, task.offset, task.size, task.stride)
        else:
            bits = source.view(result.dtype)
        result.copy_(bits.permute(task.order))

    def _fetched(self, task: Task, at: int) -> Any:
        return self._stage.fetch(self._memory[task.buffer], task, at) if task.fetched else None

    def _tensor(self, task: Task, source: Any) -> Any:
        if source is not None:
            return source
        found = self._views.get(task.row)
        if found is None:  # the same in every update
            memory = self._memory[task.buffer]
            found = self._views[task.row] = torch_view(memory, task.source, task.offset, task.size, task.stride)
        return found

    def _blocks(self, task: Task, source: Any) -> Any:
        x = self._tensor(task, source)
        return x.reshape((1,) * (3 - x.ndim) + tuple(x.shape)) if x.ndim < 3 else x.reshape(x.shape[-3:])
