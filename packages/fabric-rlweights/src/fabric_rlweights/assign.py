"""From the plan to what each rank is told."""

from __future__ import annotations

import numpy as np

from fabric_core import NetAddr
from fabric_rlweights.boxes import Ints
from fabric_rlweights.columns import LAYOUTS, QUANTS, STAGING
from fabric_rlweights.plan import ITEMSIZES, Plan
from fabric_rlweights.protocol import Assign
from fabric_rlweights.route import pack, route_of

__all__ = ["assignment"]


def assignment(plan: Plan, who: tuple[str, int], number: int, trainers: dict[int, NetAddr]) -> Assign:
    """Return what a rank is told of a plan."""
    role, rank = who
    if role == "trainer":
        return Assign(number, route_of(plan, rank).to_wire(), {}, [], 0, [])
    tensors = plan.destination.tensors
    mine = np.flatnonzero(tensors.rank == rank)
    mine = mine[np.argsort(tensors.number[mine])]
    staging = {}
    for tensor in mine.tolist():
        layout = int(tensors.layout[tensor])
        if layout:
            why = plan.destination.reasons.get(f"rank {rank}: {tensors.names[tensor]}", "")
            kind = "strided" if layout == STAGING and why.startswith("it would be written") else LAYOUTS[layout]
            staging[int(tensors.number[tensor])] = (int(tensors.nbytes[tensor]), kind)
    writers = np.unique(plan.trainer[plan.receiver == rank]).tolist()
    names = [tensors.names[tensor] for tensor in mine.tolist()]
    columns = {name: pack(column) for name, column in _boxes(plan, rank).items()}
    peers = [trainers[writer].to_bytes() for writer in writers if writer in trainers]
    return Assign(number, columns, staging, names, plan.expected(rank), peers)


def _boxes(plan: Plan, rank: int) -> dict[str, Ints]:
    """The boxes of its tensors that an update writes, for digests: wants, and the tensors of scales."""
    tensors, wants = plan.destination.tensors, plan.destination.wants
    rows = np.flatnonzero(tensors.rank[wants.tensor] == rank)
    tensor = wants.tensor[rows]
    scales = np.unique(tensors.scales[(tensors.rank == rank) & (tensors.quant != QUANTS.index(""))])
    axes = max(wants.size.shape[1], tensors.shape.shape[1])

    def wide(array: Ints, fill: int) -> Ints:
        return np.pad(array, ((0, 0), (axes - array.shape[1], 0)), constant_values=fill)

    return {
        "tensor": tensors.number[np.concatenate([tensor, scales])],
        "offset": np.concatenate([wants.offset[rows], np.zeros(len(scales), np.int64)]),
        "size": np.concatenate([wide(wants.size[rows], 1), wide(tensors.shape[scales], 1)]),
        "stride": np.concatenate([wide(wants.stride[rows], 0), wide(tensors.stride[scales], 0)]),
        "item": ITEMSIZES[tensors.dtype[np.concatenate([tensor, scales])]],
    }
