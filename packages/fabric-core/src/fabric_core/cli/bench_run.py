"""Runs the jobs of `fabric bench`: starts the peer, alternates rounds with limits, and makes rows out of samples."""

from __future__ import annotations

import json
import os
import platform
import secrets
import selectors
import statistics
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from fabric_core.cli import limits, machine
from fabric_core.cli.bench_ops import OPS, Link, Plan, Sample
from fabric_core.cli.models import Bench, BenchRow
from fabric_core.cli.session import Session, open_engine, parse_address
from fabric_core.config import Settings
from fabric_core.errors import BackendError

__all__ = ["Job", "run", "spawned_peer"]

_START_SECONDS = 20.0

#: Throughput figures move about this much data unless -n says otherwise.
_VOLUME = 256 << 20


@dataclass(slots=True)
class Job:
    """One row: an operation at one size, with what the rounds brought."""

    op: str
    size: int
    pages: int
    n: int  #: 0: by size
    window: int
    verify: bool
    samples: list[Sample] = field(default_factory=list)
    limits: list[limits.Limit] = field(default_factory=list)

    def plan(self, seed: int, longest: int) -> Plan:
        """Work out the count, and check the size against the peer's message limit. Raises BackendError."""
        if self.op == "sendrecv" and self.size > longest:
            raise BackendError(f"messages of {self.size} bytes: the two sides take at most {longest}")
        if self.n:
            count = self.n
        elif self.op == "submit":
            count = 20_000
        elif self.op == "imm":
            count = 5_000
        else:
            count = max(16, min(5_000, _VOLUME // self.size))
        return Plan(self.size, count, self.window, self.pages, self.verify, seed)


@contextmanager
def spawned_peer(backend: str, nics: int | None, device: str = "cpu") -> Iterator[str]:
    """Start a bench peer as a process of its own; yields its address, ends it afterwards."""
    name = f"bench-{os.getpid()}-{secrets.token_hex(2)}"
    words = [
        sys.executable,
        "-m",
        "fabric_core.cli.bench_peer",
        "--name",
        name,
        "--backend",
        backend,
        "--device",
        device,
    ]
    if nics is not None:
        words += ["--nics", str(nics)]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield _first_line(child)
    finally:
        if child.stdin:
            child.stdin.close()  # it ends by itself when its stdin does
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout:
            child.stdout.close()


def _first_line(child: subprocess.Popen[bytes]) -> str:
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        ready = selector.select(_START_SECONDS)
    line = child.stdout.readline() if ready else b""
    try:
        return str(json.loads(line)["address"])
    except (ValueError, KeyError, TypeError):
        raise BackendError("the second process did not start; what it said is above") from None


def run(
    jobs: list[Job],
    *,
    rounds: int,
    memory: str,
    backend: str,
    nics: int | None,
    peer_nics: int | None,
    connect: str,
    progress: Callable[[str], None],
) -> Bench:
    """Do all jobs `rounds` times in turn, with the peer at `connect` or one of our own. Raises FabricError."""
    with ExitStack() as stack:
        ours = backend or (parse_address(connect).backend if connect else "")
        here, _, there = memory.partition(":")
        there = there or here
        device = "cuda:0" if "gpu" in (here, there) else "cpu"
        engine = stack.enter_context(open_engine(backend=ours, nics=nics, device=device))
        address = connect or stack.enter_context(spawned_peer(backend, peer_nics, device))
        session = stack.enter_context(Session(engine))
        link = Link(session, parse_address(address), max(_needed(job) for job in jobs), here, there)
        measure_limit: Callable[[int, int], limits.Limit] = limits.stream if here == "engine" else limits.cma
        if device != "cpu":
            measure_limit = lambda _size, _span: limits.link(here, there)  # noqa: E731
        for turn in range(rounds):
            for index, job in enumerate(jobs):
                plan = job.plan(seed=1 + turn * len(jobs) + index, longest=link.longest)
                progress(f"round {turn + 1} of {rounds}: {job.op}, {job.size} bytes, {plan.n} times")
                if job.op in ("write", "paged"):
                    job.limits.append(measure_limit(job.size // job.pages, plan.slots * job.size))
                job.samples.append(OPS[job.op](link, plan))
                if job.op in ("write", "paged"):
                    job.limits.append(measure_limit(job.size // job.pages, plan.slots * job.size))
        result = Bench(
            machine=_machine(),
            backend=engine.backend,
            address=address,
            nics=engine.nics,
            peer_nics=link.peer_nics,
            parameters=_parameters(jobs, rounds, memory),
            rows=[_row(job) for job in jobs],
            verdict=_verdict(jobs),
        )
        link.close()
    return result


def _needed(job: Job) -> int:
    """Bytes of buffer: all slots, or two halves for an echo."""
    return max(job.plan(0, 1 << 62).slots * job.size, 2 * max(job.size, 64))


def _machine() -> dict[str, str]:
    settings = Settings.load()
    return {
        "versions": machine.versions(),
        "machine": f"{platform.node()}, {machine.processors()}",
        "polling": settings.polling + (f", spin {settings.spin_us} us" if settings.spin_us is not None else ""),
    }


def _parameters(jobs: list[Job], rounds: int, memory: str) -> dict[str, str]:
    hows = sorted({f"{limit.name}: {limit.how}" for job in jobs for limit in job.limits if limit.bytes_per_s})
    return {
        "window": str(jobs[0].window),
        "memory": memory,
        "rounds": str(rounds),
        "limits by": "; ".join(hows) or "none",
    }


def percentile(values: array[int], share: float) -> float | None:
    """Return a percentile in microseconds of samples in nanoseconds."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1000


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _row(job: Job) -> BenchRow:
    """Medians over the rounds; wrong bytes are added up."""
    seconds = _median([s.elapsed_ns / s.operations / 1e9 if s.operations else None for s in job.samples])
    roof = _median([limit.bytes_per_s for limit in job.limits])
    speed = job.size / seconds if seconds and job.op != "submit" else None
    wrong = [sample.wrong for sample in job.samples if sample.wrong is not None]
    return BenchRow(
        op=job.op,
        size_bytes=job.size,
        pages=job.pages,
        n=job.plan(0, 1 << 62).n,
        time_p50_us=_median([percentile(sample.latency_ns, 0.50) for sample in job.samples]),
        time_p99_us=_median([percentile(sample.latency_ns, 0.99) for sample in job.samples]),
        gbit_s=speed * 8 / 1e9 if speed else None,
        gbyte_s=speed / 1e9 if speed else None,
        limit=job.limits[0].name if job.limits else "",
        limit_gbyte_s=roof / 1e9 if roof else None,
        limit_percent=100 * speed / roof if speed and roof else None,
        mops=job.pages / seconds / 1e6 if seconds else None,
        post_p50_us=_median([percentile(sample.post_ns, 0.50) for sample in job.samples]),
        post_p99_us=_median([percentile(sample.post_ns, 0.99) for sample in job.samples]),
        wrong_bytes=sum(wrong) if wrong else None,
    )


def _verdict(jobs: list[Job]) -> str:
    wrong = sum(sample.wrong or 0 for job in jobs for sample in job.samples)
    if wrong:
        return f"WRONG: {wrong} bytes did not arrive as they were sent"
    if any(sample.wrong is None for job in jobs for sample in job.samples):
        return "data were not compared (--no-verify)"
    return "OK: all data arrived as they were sent"
