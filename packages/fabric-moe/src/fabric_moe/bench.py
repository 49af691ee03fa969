"""`fabric moe bench`: starts one process for each rank, and makes figures out of what they measured."""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from fabric_core import BackendError, ConfigError
from fabric_core.cli.models import Model
from fabric_moe.bench_order import PHASES, Order
from fabric_moe.config import MoeConfig, machine_memory
from fabric_moe.dtypes import bits_of
from fabric_moe.gate import Limit

__all__ = ["Figures", "MoeBench", "Phase", "run"]


class Phase(Model):
    """A part of a step: the slowest rank of each step, over all steps, in microseconds."""

    name: str
    p50_us: float
    p90_us: float
    p99_us: float
    p999_us: float


class Figures(Model):
    """One run."""

    ranks: int
    private_tokens: int
    steps: int
    phases: list[Phase]
    dispatch_bytes: int  #: that a rank sends in a step, in the mean over ranks: rows and counts
    dispatch_least_bytes: int  #: tokens and scales alone, once for each rank of a token's experts
    combine_bytes: int
    combine_least_bytes: int
    copies_bytes: int  #: what dispatch would send if each expert got its own copy
    late_rows: float  #: rows of a rank and step that had to wait for the counts
    copy_gb_s: float  #: what one process copies in memory: the limit of `local`, two of them at most at a time
    bound_dispatch_us: float  #: least bytes of all ranks, copied once, by all CPUs at that rate
    bound_combine_us: float
    memory_bytes: int
    in_c: bool  #: whether the proxy has sent; else Python
    compared: int  #: tokens that were compared with the reference, bit for bit
    wrong: int


class MoeBench(Model):
    """What `--json` prints."""

    preset: str
    backend: str
    cpus: int
    groups: int  #: of experts, that the gate knows; 1: any experts
    most_groups: int  #: that a token's experts come from
    config: dict[str, Any]
    runs: list[Figures]


def run(
    config: MoeConfig, *, steps: int, warmup: int, backend: str, seed: int, limit: float, gate: Limit | None = None,
    in_c: bool = True,
) -> Figures:  # fmt: skip
    """Run one group, each rank a process, for at most `limit` seconds.

    gate: the groups that a token's experts come from; None: any experts. in_c: whether the proxy sends, or Python.

    Raises ConfigError for a shape that cannot be measured, BackendError if a rank fails.
    """
    if config.topk > config.experts:
        raise ConfigError(
            f"topk={config.topk} of experts={config.experts}: a token's experts are drawn without repetition; "
            "lower --topk, or raise --experts"
        )
    if gate is not None:
        gate.check(config.experts, config.topk)
    if (wanted := config.memory()["total"] * config.ranks) > (most := machine_memory()):
        raise ConfigError(
            f"{config.ranks} ranks register {wanted} bytes, this machine has {most}: lower --ranks or --tokens"
        )
    forks = multiprocessing.get_context("forkserver")  # importing torch takes seconds: one process does it for all
    forks.set_forkserver_preload(["torch", "fabric_moe.bench_rank"])  # no effect if the program has one running already
    from fabric_moe import bench_rank

    with tempfile.TemporaryDirectory(prefix="fabric-moe-") as folder:
        order = Order(config, f"file:{folder}/board", backend, steps, warmup, seed, gate, in_c)
        ranks = []
        try:
            for rank in range(config.ranks):
                ours, theirs = forks.Pipe()
                process = forks.Process(target=bench_rank.main, args=(order, rank, theirs), daemon=True)
                process.start()
                theirs.close()
                ranks.append((process, ours))
            found = _collect([pipe for _, pipe in ranks], limit)
        finally:
            for process, pipe in ranks:
                process.kill()
                process.join()
                pipe.close()
    return _figures(config, steps, found)


def _collect(pipes: list[Connection], limit: float) -> list[dict[str, Any]]:
    """Hear the figures of all ranks. Nobody leaves before: the others may still need what a rank has to send."""
    deadline = time.monotonic() + limit
    found: dict[int, dict[str, Any]] = {}
    while len(found) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise BackendError(f"a rank was not ready after {limit:g} s: fewer --steps, or a higher --limit")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                word = pipes[rank].recv()
            except EOFError:
                raise BackendError(f"rank {rank} ended without a word") from None
            if isinstance(word, str):
                raise BackendError(f"rank {rank} failed: {word}")
            found[rank] = word
    return [found[rank] for rank in range(len(pipes))]


def _phase(name: str, us: np.ndarray[Any, Any]) -> Phase:
    p50, p90, p99, p999 = (float(np.quantile(us, q, method="higher")) for q in (0.5, 0.9, 0.99, 0.999))
    return Phase(name=name, p50_us=p50, p90_us=p90, p99_us=p99, p999_us=p999)


def _figures(config: MoeConfig, steps: int, found: list[dict[str, Any]]) -> Figures:
    times = np.array([one["times"] for one in found]) * 1e6  # [rank, step, phase]
    worst = times.max(axis=0)
    phases = [_phase(name, worst[:, i]) for i, name in enumerate(PHASES)]
    dispatch = times[:, :, 0] + times[:, :, 1]
    combine = times[:, :, 3] + times[:, :, 4]
    phases += [_phase("dispatch", dispatch.max(axis=0)), _phase("combine", combine.max(axis=0))]
    rows = float(np.mean([one["rows"] for one in found]))
    counts = (64 + -(-4 * config.ranks // 64) * 64) * config.ranks
    least = rows * (config.token_bytes + config.scale_bytes)
    back = rows * config.hidden * bits_of(config.wire) / 8
    rate = float(np.median([one["copy_bytes_per_s"] for one in found]))
    cpus = min(len(os.sched_getaffinity(0)), config.ranks)
    return Figures(
        ranks=config.ranks,
        private_tokens=max(int(one["private"]) for one in found),
        steps=steps,
        phases=phases,
        dispatch_bytes=math.ceil(rows * config.row_bytes + counts),
        dispatch_least_bytes=math.ceil(least),
        combine_bytes=math.ceil(rows * config.sum_bytes + 64 * config.ranks),
        combine_least_bytes=math.ceil(back),
        copies_bytes=config.max_tokens * config.topk * (config.token_bytes + config.scale_bytes),
        late_rows=float(np.mean([one["late_rows"] for one in found])),
        copy_gb_s=rate / 1e9,
        bound_dispatch_us=least * config.ranks / (rate * cpus) * 1e6,
        bound_combine_us=back * config.ranks / (rate * cpus) * 1e6,
        memory_bytes=config.memory()["total"],
        in_c=all(one["in_c"] for one in found),
        compared=sum(int(one["compared"]) for one in found),
        wrong=sum(int(one["wrong"]) for one in found),
    )
