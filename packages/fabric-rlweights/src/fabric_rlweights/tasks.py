"""What a trainer rank does in an update, as tasks: one source, made ready once, and all the places that it goes to."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np

from fabric_core import ConfigError
from fabric_rlweights.arena import aligned
from fabric_rlweights.boxes import Ints
from fabric_rlweights.dtypes import NAMES, itemsize_of
from fabric_rlweights.moves import pages
from fabric_rlweights.plan import BLOCK, PER_TENSOR
from fabric_rlweights.quantise import workspace
from fabric_rlweights.route import Route

__all__ = ["Target", "Task", "fit", "make_tasks"]

Shape = tuple[int, ...]


@dataclass(slots=True)
class Target:
    """Where a task's bytes go: one write, or pages. Offsets are bytes."""

    receiver: int
    tensor: int
    run: int
    places: Ints  #: of each run in the tensor
    scales: int = -1  #: the tensor of scales
    scale_run: int = 0
    scale_places: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(slots=True)
class Task:
    """One piece of a parameter of this rank."""

    row: int  #: the first of its pieces in the route
    buffer: int
    offset: int
    size: Shape
    stride: Shape
    source: str
    target: str
    op: int
    copied: bool
    block: int  #: 0: no blocks
    first: tuple[int, int]  #: row and column of its first element in the parameter
    order: tuple[int, ...]  #: its axes as they lie at the destination, outermost first
    runs: Ints  #: straight out of the buffer: the offset of each run, bytes
    nbytes: int  #: of the result
    work: int  #: bytes of float32 beside it
    scale_bytes: int
    targets: list[Target]
    fetched: int = 0  #: bytes of its source, if that is copied to where pieces are made

    @property
    def temporary(self) -> int:
        """Bytes that it takes of the arena."""
        return self.places[-1] if self.copied else 0

    @property
    def places(self) -> tuple[int, int, int, int]:
        """Where its scales, its float32 and its fetched source lie in what it takes of the arena, and the end."""
        found = [aligned(self.nbytes)]
        for part in (self.scale_bytes, self.work, self.fetched):
            found.append(found[-1] + (aligned(part) if part else 0))
        return found[0], found[1], found[2], found[3]

    @property
    def span(self) -> tuple[int, int]:
        """(first byte, end) of what it reads of its buffer."""
        steps = [(n - 1) * step for n, step in zip(self.size, self.stride, strict=True)]
        low = self.offset + sum(step for step in steps if step < 0)
        return low, self.offset + sum(step for step in steps if step > 0) + itemsize_of(self.source)

    @property
    def written(self) -> int:
        """Bytes that it puts on the wire."""
        return self.nbytes * len(self.targets)


def make_tasks(route: Route) -> list[Task]:
    """Return a rank's tasks, longest first; ties start at different receivers at different ranks."""
    tasks: dict[tuple[object, ...], Task] = {}
    for row in range(len(route)):
        size, stride, step = _row(route.size, row), _row(route.stride, row), _row(route.step, row)
        op, copied, tensor = int(route.op[row]), bool(route.copied[row]), int(route.tensor[row])
        receiver, target = int(route.receiver[row]), NAMES[int(route.target[row])]
        order = tuple(sorted(range(len(size)), key=lambda axis: -step[axis] if size[axis] > 1 else 0))
        if op >= BLOCK:
            order = tuple(range(len(size)))  # blocks want rows and columns; so does the destination, see tables.py
        key = (
            int(route.buffer[row]), int(route.offset[row]), size, stride, op, target, int(route.block[row]),
            order if copied else (row,), (receiver, tensor) if op == PER_TENSOR else (),
        )  # fmt: skip
        task = tasks.get(key)
        if task is None:
            tasks[key] = task = _task(route, row, size, stride, op, copied, target, order)
        item = itemsize_of(target)
        if copied:
            run, (places,) = pages(size, item, step)
        else:
            run, (places, task.runs) = _both(size, item, stride, step)
            task.runs = task.runs + task.offset
        if run != route.run[row] or len(places) != route.writes[row]:
            raise ConfigError(
                f"piece {row} of the route has {len(places)} writes of {run} bytes, the plan says otherwise"
            )
        task.targets.append(_with_scales(route, row, Target(receiver, tensor, run, places + int(route.at[row]))))
    return sorted(tasks.values(), key=lambda task: -task.written)


def fit(tasks: list[Task], *, fetched: Set[int], fused: bool) -> None:
    """Say what pieces made on a GPU need. `fetched`: the buffers in host memory; `fused`: no float32 of its own."""
    for task in tasks:
        if task.copied:
            if task.buffer in fetched:
                task.fetched = int(np.prod(task.size, dtype=np.int64)) * itemsize_of(task.source)
            if fused:
                task.work = 0


def _row(array: Ints, row: int) -> Shape:
    return tuple(array[row].tolist())


def _both(size: Shape, item: int, stride: Shape, step: Shape) -> tuple[int, tuple[Ints, Ints]]:
    run, (mine, theirs) = pages(size, item, stride, step)
    return run, (theirs, mine)


def _task(
    route: Route, row: int, size: Shape, stride: Shape, op: int, copied: bool, target: str, order: tuple[int, ...]
) -> Task:
    count = int(np.prod(size, dtype=np.int64))
    block = int(route.block[row]) if op == BLOCK else 0
    touched = int(np.prod(route.touch_size[row], dtype=np.int64))
    work = 0
    if op >= BLOCK:
        if any(extent != 1 for extent in size[:-3]):
            raise ConfigError(f"piece {row} of the route has shape {size}: only 3 axes are quantised")
        one = [np.array([n], np.int64) for n in (size[-2], size[-1], block or 128)]
        work = int(workspace(*one)[0])
    return Task(
        row=row,
        buffer=int(route.buffer[row]),
        offset=int(route.offset[row]),
        size=size,
        stride=stride,
        source=NAMES[int(route.source[row])],
        target=target,
        op=op,
        copied=copied,
        block=block,
        first=(int(route.start[row, -2]), int(route.start[row, -1])),
        order=order,
        runs=np.zeros(0, np.int64),
        nbytes=count * itemsize_of(target),
        work=work,
        scale_bytes=4 * touched if op >= BLOCK else 0,
        targets=[],
    )


def _with_scales(route: Route, row: int, target: Target) -> Target:
    if route.scale_writes[row]:
        target.scales = int(route.scales[row])
        target.scale_run, (places,) = pages(_row(route.own_size, row), 4, _row(route.scale_step, row))
        target.scale_places = places + int(route.scale_at[row])
    return target
