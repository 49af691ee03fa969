"""`fabric rl bench`: a real job on this host, our update beside what frameworks do, and the limit, all in one run."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from fabric_core import BackendError, ConfigError
from fabric_rlweights.job.launch import Job, Setup
from fabric_rlweights.job.limit import rates

LEAST_WATERMARK = 256  #: bytes
__all__ = ["RlBench", "Watermark", "Watermarks", "Way", "bench", "watermarks"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Way(_Model):
    """One way to move the weights, over all rounds."""

    name: str
    seconds: list[float]
    median_s: float
    gbyte_s: float  #: of bytes that inference ranks hold, by the median
    equal: bool | None  #: the inference ranks hold the same bytes as after the first way


class Watermark(_Model):
    """An update under a watermark. `peak_bytes` is the largest of all trainer ranks."""

    limit_bytes: int
    peak_bytes: int
    seconds: float


class Watermarks(_Model):
    """The same update under several."""

    trainers: int
    receivers: int
    bytes: int  #: written, of twice as many that were cast
    runs: list[Watermark]


class RlBench(_Model):
    """What a run found."""

    trainers: int
    tp: int
    receivers: int
    model_bytes: int
    bytes: int  #: that all inference ranks hold together, so what an update must move
    straight: float  #: share of it that is written out of the parameters, without a copy
    pieces: int
    plan_s: float
    limits_gbyte_s: dict[str, float]  #: as many processes as trainers copy as much, all at once: see job/limit.py
    limit_gbyte_s: float | None  #: the larger of them
    peak_bytes: int = 0  #: of temporary memory, the largest of all trainer ranks
    ways: list[Way]
    of_limit: float | None
    over_rank0: float | None
    over_broadcast: float | None


def bench(setup: Setup, rounds: int, baselines: bool, note: Callable[[str], None]) -> RlBench:
    """Run it. Raises BackendError if an update is not committed; PeerLost, DeadlineExceeded."""
    note(f"starting {setup.trainers} trainers and {setup.receivers} inference ranks ...")
    seconds: dict[str, list[float]] = {}
    digests: dict[str, list[str]] = {}
    straight = moved = 0
    copied: dict[str, list[float]] = {}
    if baselines:
        _limit(setup, rounds, copied, note)
    with Job(setup) as job:
        plan = job.controller.plan
        assert plan is not None
        everybody = [*job.trainers, *job.receivers]
        shapes = {name: list(shape) for name, shape in setup.model.shapes().items()}
        tables = [answer["table"] for answer in job.all(job.trainers, "table")] if baselines else []
        job.all(job.trainers, "fill_fast", 300.0, version=1)
        job.update(1, 120.0)  # connects, maps, touches every page: not measured
        for number in range(rounds):
            version = number + 2
            note(f"round {number + 1} of {rounds} ...")
            job.all(job.receivers, "spoil")
            begin = time.monotonic()
            report, answers = job.update(version, 120.0)
            seconds.setdefault("fabric", []).append(time.monotonic() - begin)
            if not report.committed or report.culprits:
                raise BackendError(f"update {version}: {report.reason}")
            straight = sum(answer["stats"]["straight"] for answer in answers)
            moved = sum(answer["stats"]["bytes"] for answer in answers)
            _digest(job, "fabric", digests)
            for way, more in (("rank0", {"shapes": shapes}), ("broadcast", {"tables": tables})) if baselines else ():
                job.all(job.receivers, "spoil")
                answers = job.all(everybody, way, 300.0, **more)
                seconds.setdefault(way, []).append(max(answer["seconds"] for answer in answers))
                _digest(job, way, digests)
        wanted = int(plan.nbytes.sum())
        plan_s = _plan_again(job)
    if baselines:  # before and after, for what else the machine does may change meanwhile
        _limit(setup, rounds, copied, note)
    limits = {kind: statistics.median(rates) for kind, rates in copied.items()}
    limit = max(limits.values(), default=None)
    ways = [_way(name, times, wanted, digests) for name, times in seconds.items()]
    by_name = {way.name: way for way in ways}
    ours = by_name["fabric"].median_s
    return RlBench(
        trainers=setup.trainers,
        tp=setup.tp,
        receivers=setup.receivers,
        model_bytes=setup.model.nbytes,
        bytes=wanted,
        straight=straight / max(moved, 1),
        pieces=len(plan.pieces),
        plan_s=plan_s,
        limits_gbyte_s=limits,
        limit_gbyte_s=limit,
        ways=ways,
        of_limit=wanted / ours / 1e9 / limit if limit else None,
        over_rank0=by_name["rank0"].median_s / ours if "rank0" in by_name else None,
        over_broadcast=by_name["broadcast"].median_s / ours if "broadcast" in by_name else None,
    )


def _limit(setup: Setup, rounds: int, copied: dict[str, list[float]], note: Callable[[str], None]) -> None:
    note(f"{setup.trainers} processes copy as much, for the limit ...")
    for kind, seen in rates(setup.model, setup.trainers, rounds).items():
        copied.setdefault(kind, []).extend(seen)


def watermarks(setup: Setup, limits: list[int], rounds: int, note: Callable[[str], None]) -> Watermarks:
    """Cast float32 weights to bfloat16 on their way, under each limit. Raises BackendError if one is exceeded."""
    runs: list[Watermark] = []
    if min(limits, default=0) < LEAST_WATERMARK:
        raise ConfigError(f"a watermark of {min(limits, default=0)} bytes: at least {LEAST_WATERMARK}, for two pieces")
    for limit in limits:
        note(f"a watermark of {limit} bytes ...")
        # two pieces at a time: one is made while the other is written
        sized = dataclasses.replace(setup, watermark=limit, piece_bytes=max(1, min(setup.piece_bytes, limit // 2 - 64)))
        with Job(sized) as job:
            job.all(job.trainers, "fill", 300.0, version=1)
            times, peak = [], 0
            for version in range(1, rounds + 2):
                report, answers = job.update(version, 120.0)
                if not report.committed:
                    raise BackendError(f"update {version}: {report.reason}")
                times.append(report.seconds)
                peak = max(peak, *(answer["stats"]["peak"] for answer in answers))
            wrong = [answer["wrong"] for answer in job.all(job.receivers, "check", 120.0, version=1)]
            plan = job.controller.plan
            assert plan is not None
            nbytes = int(plan.nbytes.sum())
        if peak > limit or any(wrong):
            raise BackendError(f"watermark {limit}: {peak} bytes at the peak; wrong tensors: {wrong}")
        runs.append(Watermark(limit_bytes=limit, peak_bytes=peak, seconds=statistics.median(times[1:])))
    return Watermarks(trainers=setup.trainers, receivers=setup.receivers, bytes=nbytes, runs=runs)


def _digest(job: Job, way: str, digests: dict[str, list[str]]) -> None:
    found = [answer["digest"] for answer in job.all(job.receivers, "digest", 120.0)]
    digests.setdefault(way, []).extend(found)


def _plan_again(job: Job) -> float:
    """How long the plan takes on these tables."""
    from fabric_rlweights.plan import make_plan

    plan = job.controller.plan
    assert plan is not None
    begin = time.monotonic()
    make_plan(plan.params, plan.held, plan.destination, options=plan.options)
    return time.monotonic() - begin


def _way(name: str, times: list[float], wanted: int, digests: dict[str, list[str]]) -> Way:
    middle = statistics.median(times)
    equal = digests[name] == digests["fabric"] if len(digests) > 1 else None
    return Way(name=name, seconds=times, median_s=middle, gbyte_s=wanted / middle / 1e9, equal=equal)
