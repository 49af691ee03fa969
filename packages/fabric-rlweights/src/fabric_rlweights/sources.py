"""The memory that a trainer's tasks read, by the numbers of its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fabric_core import BadRange
from fabric_rlweights.tasks import Task
from fabric_rlweights.views import flat

__all__ = ["sources"]


def sources(tasks: list[Task], buffers: Sequence[Any]) -> dict[int, Any]:
    """Return buffer -> its bytes, for those that tasks read. Raises BadRange for tasks that leave their buffer."""
    used = sorted({task.buffer for task in tasks})
    if used and not 0 <= used[0] <= used[-1] < len(buffers):
        raise BadRange(f"the route reads buffer {used[-1]}, this rank has {len(buffers)}")
    memory = {index: flat(buffers[index]) for index in used}
    for task in tasks:  # what is packed is read by numpy, which would not notice
        low, end = task.span
        if low < 0 or end > len(memory[task.buffer]):
            raise BadRange(
                f"the trainer's table puts a box of {task.size} {task.source} into bytes {low}..{end} of buffer "
                f"{task.buffer}, which has {len(memory[task.buffer])}: give the buffers that it was made of"
            )
    return memory
