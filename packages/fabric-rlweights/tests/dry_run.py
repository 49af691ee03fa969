"""A plan carried out in numpy, without an engine: every run of every task is copied, and every byte is counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from oracle import World

from fabric_rlweights.dtypes import NAMES, bits_of, itemsize_of
from fabric_rlweights.plan import Options, Plan, make_plan
from fabric_rlweights.route import Route, route_of
from fabric_rlweights.tables import destination, holdings
from fabric_rlweights.tasks import make_tasks


@dataclass
class Outcome:
    plan: Plan
    memory: dict[tuple[int, int], NDArray[np.uint8]]  #: (rank, tensor's number) -> bytes
    times: dict[tuple[int, int], NDArray[np.uint8]]  #: how often each byte was written
    arrivals: dict[int, int]  #: rank -> immediates
    straight: int
    copied: int

    def values(self, row: int) -> NDArray[np.unsignedinteger]:
        """The elements of a tensor (row of the plan's tensors)."""
        return self._view(self.memory, row, itemsize_of(NAMES[int(self.plan.destination.tensors.dtype[row])]))

    def counts(self, row: int) -> NDArray[np.unsignedinteger]:
        """How often the first byte of each element was written."""
        tensors = self.plan.destination.tensors
        data = self.times[int(tensors.rank[row]), int(tensors.number[row])]
        return np.lib.stride_tricks.as_strided(data, tuple(tensors.shape[row]), tuple(tensors.stride[row]))

    def _view(
        self, where: dict[tuple[int, int], NDArray[np.uint8]], row: int, item: int
    ) -> NDArray[np.unsignedinteger]:
        tensors = self.plan.destination.tensors
        data = where[int(tensors.rank[row]), int(tensors.number[row])]
        bits = data[: len(data) // item * item].view(bits_of(item))
        return np.lib.stride_tricks.as_strided(bits, tuple(tensors.shape[row]), tuple(tensors.stride[row]))


def plan_of(world: World, options: Options | None = None, without: frozenset[int] = frozenset()) -> Plan:
    params, held = holdings(world.trainers)
    return make_plan(params, held, destination(world.engines, params), options=options, without=without)


def carry_out(world: World, plan: Plan) -> Outcome:
    tensors = plan.destination.tensors
    keys = [(int(r), int(n)) for r, n in zip(tensors.rank, tensors.number, strict=True)]
    memory = {key: np.full(int(n), 0xFF, np.uint8) for key, n in zip(keys, tensors.nbytes, strict=True)}
    times = {key: np.zeros(len(data), np.uint8) for key, data in memory.items()}
    done = Outcome(plan, memory, times, dict.fromkeys(plan.receivers, 0), 0, 0)
    for rank in plan.trainers:
        route = Route.from_wire(route_of(plan, rank).to_wire())
        for task in make_tasks(route):
            source = world.buffers[rank][task.buffer]
            for target in task.targets:
                if task.copied:
                    bits = source[task.offset :]
                    item = itemsize_of(task.source)
                    bits = bits[: len(bits) // item * item].view(bits_of(item))
                    box = np.lib.stride_tricks.as_strided(bits, task.size, task.stride)
                    flat = np.ascontiguousarray(box.transpose(task.order)).view(np.uint8).reshape(-1)
                    runs = [flat[i * target.run : (i + 1) * target.run] for i in range(len(target.places))]
                    done.copied += len(flat)
                else:
                    runs = [source[at : at + target.run] for at in task.runs.tolist()]
                    done.straight += task.nbytes
                for place, data in zip(target.places.tolist(), runs, strict=True):
                    assert len(data) == target.run
                    memory[target.receiver, target.tensor][place : place + target.run] = data
                    times[target.receiver, target.tensor][place : place + target.run] += 1
                    done.arrivals[target.receiver] += 1
    return done
