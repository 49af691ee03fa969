"""What an update of a large model would take: the real plan, the core's model of NICs, the paper's preparation costs.

Each trainer rank makes its tasks ready one after the other, longest first, and hands their writes to its NIC at once. A
NIC works through what it is given in order, the receiver's NIC through what arrives; both at the rate and with the
latency that `fabric_core.sim_predict` says. What the model leaves out: congestion in switches, and the flow control by
which a busy receiver would slow down its senders. The same question always has the same answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict

from fabric_core import ConfigError
from fabric_core.sim_predict import nics, predict
from fabric_rlweights.boxes import Ints, unique_rows, volume
from fabric_rlweights.plan import ASIS, ITEMSIZES, Plan, make_plan
from fabric_rlweights.presets import PRESETS, preset

__all__ = ["PAPER", "Costs", "Simulated", "simulate"]


@dataclass(frozen=True)
class Costs:
    """What preparing costs, in seconds and bytes. Defaults: the paper's rank 0, Kimi-K2 (arXiv 2510.27656, section 5).

    Of its 1,233 ms, 518 are `full_tensor` (974 calls), 357 waiting for others, 26 submitting (1,144 x 23 us), 42
    waiting for writes. The 290 ms that are left are preparation: 298 us for each of 974 parameters, or 28 GB/s of the
    8.1 GB of bf16 that one of 256 ranks holds. A piece is charged the larger of the two.
    """

    piece_s: float = 298e-6
    source_bytes_s: float = 28e9
    submit_s: float = 23e-6
    gather_s: float = 532e-6  #: of a `full_tensor`; the plan needs none
    control_s: float = 2e-3  #: offers, ready, commit: six messages one after the other


PAPER = {"total_s": 1.233, "full_tensor_s": 0.518, "waiting_s": 0.357, "submit_s": 0.026, "wire_wait_s": 0.042}


class Simulated(BaseModel):
    """What came of it. Times in seconds; a rank's stages add up to the total."""

    model_config = ConfigDict(extra="forbid")

    preset: str
    nic: str
    trainers: int
    receivers: int
    params: int
    pieces: int
    writes: int
    wire_bytes: int
    plan_s: float
    plan_cpu_s: float
    total_s: float
    prepare_s: float  #: of the busiest rank
    submit_s: float  #: of the same
    exchange_s: float  #: magnitudes between trainers, of the slowest
    wire_exposed_s: float  #: from the last rank's last submit until everything has landed
    waiting_s: float  #: mean over ranks: done, and others are not
    control_s: float
    busiest_sender_bytes: int
    busiest_receiver_bytes: int
    mean_sender_bytes: float
    floor_s: float  #: the busiest NIC's bytes at its payload rate
    of_floor: float
    backlog_bytes: int  #: results made and not yet sent, of the worst rank: the watermark that it takes
    paper_total_s: float | None


def simulate(name: str, *, nic: str = "cx7", costs: Costs | None = None, plan: Plan | None = None) -> Simulated:
    """Simulate an update of a preset. `plan`: one that was made already. Raises ConfigError for unknown names."""
    costs = costs or Costs()
    real = [model.name for model in nics() if model.name != "none"]  # which costs nothing, so there is no answer
    if nic not in real:
        raise ConfigError(f"no NIC is called {nic!r}; there are {', '.join(real)}")
    begin, cpu = time.monotonic(), time.process_time()
    if plan is None:
        plan = make_plan(*preset(name))
    plan_s, plan_cpu_s = time.monotonic() - begin, time.process_time() - cpu
    trainer, receiver, pieces = plan.trainer, plan.receiver, plan.pieces
    nbytes, rate = plan.nbytes, _Rate(nic)
    # Writes of one source piece with one result (replicas at the destination) share its preparation.
    dtype = plan.destination.tensors.dtype[plan.tensor]
    first, task = unique_rows(pieces.held, pieces.start, pieces.size, pieces.op, dtype)
    source = volume(pieces.size[first]) * ITEMSIZES[np.array(plan.params.dtypes)[plan.held.param[pieces.held[first]]]]
    owner = trainer[first]
    prepare = np.where(
        (pieces.op[first] == ASIS) & (pieces.copied[first] == 0),
        0.0,
        np.maximum(costs.piece_s, source / costs.source_bytes_s),
    )
    fan = np.bincount(task, minlength=len(first))
    scale = np.bincount(task, weights=pieces.scale_writes > 0, minlength=len(first))
    submit = (fan + scale) * costs.submit_s
    exchange = _exchange(plan, rate)
    ready, busy = _in_turn(owner, source, prepare + submit, exchange)
    ends, worst = _wire(trainer, receiver, nbytes, ready[task], rate)
    ranks = len(plan.trainers)
    last_ready = np.zeros(ranks)
    np.maximum.at(last_ready, np.searchsorted(plan.trainers, owner), ready)
    done = np.zeros(ranks)
    np.maximum.at(done, np.searchsorted(plan.trainers, trainer), ends)
    total = float(ends.max()) + costs.control_s
    sent = np.bincount(trainer, weights=nbytes)
    got = np.bincount(receiver, weights=nbytes)
    slowest = int(np.argmax(busy))
    mine = owner == plan.trainers[slowest]
    floor = max(float(sent.max()), float(got.max())) / rate.best
    return Simulated(
        preset=name,
        nic=nic,
        trainers=ranks,
        receivers=len(plan.receivers),
        params=len(plan.params.names),
        pieces=len(pieces),
        writes=int((pieces.writes + pieces.scale_writes).sum()),
        wire_bytes=int(nbytes.sum()),
        plan_s=plan_s,
        plan_cpu_s=plan_cpu_s,
        total_s=total,
        prepare_s=float(prepare[mine].sum()),
        submit_s=float(submit[mine].sum()),
        exchange_s=float(exchange.max(initial=0.0)),
        wire_exposed_s=float(ends.max() - last_ready.max()),
        waiting_s=float((ends.max() - done).mean()),
        control_s=costs.control_s,
        busiest_sender_bytes=int(sent.max()),
        busiest_receiver_bytes=int(got.max()),
        mean_sender_bytes=float(sent[sent > 0].mean()),
        floor_s=floor,
        of_floor=floor / total,
        backlog_bytes=worst,
        paper_total_s=PAPER["total_s"] if PRESETS.get(name) and name.startswith("kimi-k2-256x128") else None,
    )


class _Rate:
    """Seconds that a write of a size keeps a NIC busy, from predictions at some sizes; and how late it lands."""

    def __init__(self, nic: str) -> None:
        sizes = [1 << k for k in range(9, 25)]
        found = [predict(nic, "write", size=size, depth=8) for size in sizes]
        self._sizes = np.array(sizes, float)
        self._seconds = np.array([f.seconds for f in found])
        self.best = max(f.bytes_per_s for f in found)
        alone = predict(nic, "write", size=sizes[0])
        self.latency = alone.seconds
        if self.best <= 0:
            raise ConfigError(f"the NIC {nic!r} moves nothing")

    def seconds(self, nbytes: Ints) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """[n] -> [n]"""
        inside = np.interp(nbytes, self._sizes, self._seconds)
        return np.where(nbytes > self._sizes[-1], nbytes / self.best, inside)


Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


def _exchange(plan: Plan, rate: _Rate) -> Floats:
    """When each trainer rank has its neighbours' magnitudes: one write to each, one after the other."""
    ends = np.zeros(max(plan.trainers) + 1)
    e = plan.exchange
    if len(e):
        pairs, inverse = unique_rows(e.sender, e.receiver)
        floats = np.bincount(inverse, weights=e.floats)
        took = rate.seconds((floats * 4).astype(np.int64))
        sent = np.bincount(e.sender[pairs], weights=took, minlength=len(ends))
        np.maximum.at(ends, e.receiver[pairs], sent[e.sender[pairs]] + rate.latency)
    return ends


def _in_turn(owner: Ints, size: Ints, cost: Floats, after: Floats) -> tuple[Floats, Floats]:
    """When each task is ready, if every rank does its own one after the other, longest first; and each rank's work."""
    order = np.lexsort((-size, owner))
    spent = np.cumsum(cost[order])
    first = np.searchsorted(owner[order], np.unique(owner), "left")
    base = np.concatenate([[0.0], spent])[first]
    counts = np.diff(np.append(first, len(order)))
    ready = np.empty(len(order))
    ready[order] = spent - np.repeat(base, counts)
    ready += after[owner]
    busy = np.add.reduceat(cost[order], first)
    return ready, busy


def _wire(trainer: Ints, receiver: Ints, nbytes: Ints, ready: Floats, rate: _Rate) -> tuple[Floats, int]:
    """When each write has landed, and the largest number of bytes that waited for a sender's NIC."""
    took = rate.seconds(nbytes)
    leaves = _queue(trainer, ready, took)
    ends = _queue(receiver, leaves - took, took) + rate.latency
    events = np.concatenate([ready, leaves])
    change = np.concatenate([nbytes, -nbytes])
    who = np.concatenate([trainer, trainer])
    order = np.lexsort((change, events, who))
    level = np.cumsum(change[order])
    return ends, int(level.max(initial=0))


def _queue(who: Ints, arrives: Floats, took: Floats) -> Floats:
    """When each job is done, if each of `who` takes them as they arrive: end = max(arrival, end before) + took."""
    order = np.lexsort((arrives, who))
    group, t, a = who[order], took[order], arrives[order]
    total = np.cumsum(t)
    first = np.searchsorted(group, group, "left")
    before = total - t - np.concatenate([[0.0], total])[first]  # work of the same queue ahead of this job
    lag = a - before
    # a running maximum within each queue: lift every queue above the one before it
    span = float(lag.max() - lag.min()) + 1.0 if len(lag) else 1.0
    rank = np.cumsum(np.concatenate([[0], np.diff(group) != 0])) if len(group) else group
    most = np.maximum.accumulate(lag + rank * span) - rank * span
    ends = np.empty(len(order))
    ends[order] = most + before + t
    return ends
