"""Starts the receiver, asks each question `rounds` times in turn, and makes rows of what came."""

from __future__ import annotations

import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fabric_core import ConfigError, NetAddr
from fabric_core.cli import limits, machine
from fabric_core.cli.session import Session, open_engine
from fabric_kvcache.bench.report import KvBench, KvBenchRow
from fabric_kvcache.bench.sender import Ready, Run, Sender
from fabric_kvcache.bench.start import receiver_process
from fabric_kvcache.bench.work import Work
from fabric_kvcache.cache import CacheLayout
from fabric_kvcache.plan import Chunk

__all__ = ["Question", "run"]

_COPIES = 4  # of a rank's pools that a figure needs at its worst: both sides, what should be there, what is compared


@dataclass(slots=True)
class Question:
    """One row: a pair of layouts, already cut to the layers that are run, and a prompt."""

    name: str
    src: CacheLayout
    dst: CacheLayout
    tokens: int
    chunks: list[Chunk]
    chunk_tokens: int
    compute_us: list[float]
    compute_origin: str
    model_layers: int
    tail_bytes: int
    bursts: list[Run] = field(default_factory=list)
    paced: list[Run] = field(default_factory=list)
    limits: list[limits.Limit] = field(default_factory=list)
    source_ranks: int = 0
    write_bytes: int = 0

    def work(self, seed: int, adjacent: bool) -> Work:
        return Work(
            src=self.src, dst=self.dst, tokens=self.tokens, tail_bytes=self.tail_bytes, seed=seed, adjacent=adjacent
        )  # fmt: skip


def run(
    questions: list[Question],
    *,
    rounds: int,
    memory: str,
    backend: str,
    nics: int | None,
    peer_nics: int | None,
    ready: Ready,
    merge: bool,
    adjacent: bool,
    verify: bool,
    seed: int,
    timeout: float,
    progress: Callable[[str], None],
) -> KvBench:
    """Answer all questions `rounds` times in turn. Raises FabricError."""
    here, _, there = memory.partition(":")
    there = there or here
    device = "cuda:0" if "gpu" in {here, there} else "cpu"
    for question in questions:
        _check_memory(question, seed)
    with ExitStack() as stack:
        address = NetAddr.parse(stack.enter_context(receiver_process(backend, peer_nics, device)))
        engine = stack.enter_context(open_engine(backend=backend, nics=nics, device=device))
        session = stack.enter_context(Session(engine))
        roof: Callable[[int, int], limits.Limit] = limits.stream if here == "engine" else limits.cma
        if device != "cpu":
            roof = lambda _size, _span: limits.link(here, there)  # noqa: E731
        peer_nics_found = 0
        for turn in range(rounds):
            for question in questions:
                progress(f"round {turn + 1} of {rounds}: {question.name}, {question.tokens} tokens")
                work = question.work(seed + turn, adjacent)
                sender = Sender(session, address, work, question.chunks, here, there)
                peer_nics_found = len(sender.desc.addr.domains)
                question.source_ranks = len(sender.plans)
                question.write_bytes = _usual_length(sender, merge)
                sender.run(None, merge=merge, verify=False, timeout=timeout)  # first contact, cold pages
                span = min(sum(plan.nbytes(chunk) for plan, _b in sender.plans for chunk in question.chunks), 1 << 28)
                question.limits.append(roof(question.write_bytes, span))
                question.bursts.append(sender.run(None, merge=merge, verify=verify, timeout=timeout))
                question.limits.append(roof(question.write_bytes, span))
                question.paced.append(
                    sender.run(question.compute_us, ready=ready, merge=merge, verify=verify, timeout=timeout)
                )
                sender.close()
        groups = engine.stats()["groups"]
        return KvBench(
            machine={"versions": machine.versions(), "machine": machine.processors()},
            backend=engine.backend,
            nics=engine.nics,
            peer_nics=peer_nics_found,
            parameters={
                "memory": memory,
                "rounds": str(rounds),
                "pages": "adjacent" if adjacent else "random",
                "merge": "yes" if merge else "no",
                "seed": str(seed),
            },
            submit_to_post=groups[0]["submit_to_post"],
            rows=[_row(question, memory, ready) for question in questions],
            verdict=_verdict(questions),
        )


def _check_memory(question: Question, seed: int) -> None:
    """Refuse what does not fit, before the kernel's OOM killer does."""
    work = question.work(seed, False)
    pools = {tuple((s.layers(n), s.fields(n)) for n in range(len(s.layout.groups))): s.nbytes for s in work.sources()}
    needed = sum(pools.values()) + (_COPIES - 1) * work.target_bytes
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        free = next(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return
    if needed > free:
        raise ConfigError(
            f"{question.name} with {question.tokens} tokens and {question.src.total_layers} layers needs "
            f"{needed >> 20} MiB, {free >> 20} MiB are free: take fewer --layers or --tokens"
        )


def _usual_length(sender: Sender, merge: bool) -> int:
    counts: Counter[int] = Counter()
    for plan, _buffer in sender.plans:
        moves = plan.moves(sender.chunks[0], *sender.tables, merge=merge)
        for layer in moves.layers[:1]:
            for length, source, _target in moves.at(layer):
                counts[length] += len(source)
    return counts.most_common(1)[0][0] if counts else 0


def _times(values: Iterable[array[int]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.concatenate([np.frombuffer(one, np.int64) for one in values]) / 1000


def _row(question: Question, memory: str, ready: Ready) -> KvBenchRow:
    bursts, paced = question.bursts, question.paced
    median = statistics.median
    burst_us = median((r.arrived_ns - r.began_ns) / 1000 for r in bursts)
    nbytes, writes = bursts[-1].nbytes, int(median(r.writes for r in bursts))
    rate = median(r.nbytes / (r.arrived_ns - r.began_ns) for r in bursts)
    roofs = [one.bytes_per_s for one in question.limits if one.bytes_per_s]
    roof = median(roofs) / 1e9 if roofs else None
    posted = _times(r.posted_ns for r in paced) - _times(r.ready_ns for r in paced)
    exposed = median((r.arrived_ns - r.ready_ns[-1]) / 1000 for r in paced)
    layers = len(paced[-1].ready_ns) // len(question.chunks)
    total = sum(question.compute_us)
    wrong = [r.wrong for r in (*bursts, *paced) if r.wrong is not None]
    return KvBenchRow(
        name=question.name,
        memory=memory,
        tokens=question.tokens,
        chunk_tokens=question.chunk_tokens,
        chunks=len(question.chunks),
        layers=layers,
        model_layers=question.model_layers,
        source_ranks=question.source_ranks,
        writes=writes,
        write_bytes=question.write_bytes,
        bytes=nbytes,
        plan_us=float(np.median(_times(r.plan_ns for r in (*bursts, *paced)))),
        burst_us=burst_us,
        gbyte_s=rate,
        limit=question.limits[0].name,
        limit_gbyte_s=roof,
        limit_percent=100 * rate / roof if roof else None,
        sender_cpu_us_per_write=median(r.cpu_ns / 1000 / r.writes for r in bursts),
        receiver_cpu_us_per_write=median(r.receiver_cpu_ns / 1000 / r.writes for r in bursts),
        compute_us=question.compute_us,
        compute_origin=question.compute_origin,
        ready=ready,
        posted_p50_us=float(np.percentile(posted, 50)),
        posted_p99_us=float(np.percentile(posted, 99)),
        late_p50_us=median(late for r in paced for late in r.late_us),
        exposed_us=exposed,
        overhead_percent=100 * exposed / (layers * total),
        overhead_model_percent=100 * exposed / (question.model_layers * total),
        wrong_bytes=sum(wrong) if wrong else None,
        surplus=sum(r.surplus for r in (*bursts, *paced)),
    )


def _verdict(questions: list[Question]) -> str:
    runs = [r for q in questions for r in (*q.bursts, *q.paced)]
    wrong, surplus = sum(r.wrong or 0 for r in runs), sum(r.surplus for r in runs)
    if wrong or surplus:
        return f"WRONG: {wrong} bytes, and {surplus} immediates too many"
    if any(r.wrong is None for r in runs):
        return "data were not compared (--no-verify)"
    return "OK: every byte is as it should be, also those that were not to be written"
