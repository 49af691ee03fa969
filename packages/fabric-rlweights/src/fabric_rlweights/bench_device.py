"""`fabric rl bench --device`: one trainer and one inference rank on a torch device, two processes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

from fabric_core import BackendError, ConfigError
from fabric_rlweights.bench import RlBench, Way
from fabric_rlweights.job.launch import Job, Setup

__all__ = ["bench_device", "setup_for"]


def setup_for(setup: Setup, device: str) -> Setup:
    """Return what `bench_device` runs. Raises ConfigError for more than one rank a side."""
    if (setup.trainers, setup.receivers, setup.tp) != (1, 1, 1):
        raise ConfigError(
            f"--device measures one trainer and one inference rank, not {setup.trainers} (TP {setup.tp}) and "
            f"{setup.receivers}: leave --trainers, --tp and --receivers out, or --device"
        )
    if (setup.fp8 or setup.offloaded) and setup.baselines:
        raise ConfigError("--fp8 and --offloaded have no other ways beside them: give --no-baselines")
    trainer, receiver = "fabric_rlweights.job.device_trainer", "fabric_rlweights.job.device_receiver"
    return dataclasses.replace(setup, device=device, trainer=trainer, receiver=receiver)


def bench_device(setup: Setup, rounds: int, note: Callable[[str], None]) -> RlBench:
    """Run it. The seconds of `fabric` are those of push(), from the offer until the new version is served.

    Raises BackendError if an update is not committed, or leaves other weights than it should; PeerLost,
    DeadlineExceeded.
    """
    note(f"starting a trainer and an inference rank on {setup.device} ...")
    seconds: dict[str, list[float]] = {}
    equal: dict[str, bool] = {}
    with Job(setup) as job:
        plan = job.controller.plan
        assert plan is not None
        for version in range(1, rounds + 2):
            job.all(job.trainers, "fill", 300.0, version=version)
            job.all(job.receivers, "spoil")
            report, (answer,) = job.update(version, 300.0)
            if not report.committed or report.culprits:
                raise BackendError(f"update {version}: {report.reason}")
            if version > 1:  # the first connects, maps and allocates
                seconds.setdefault("fabric", []).append(answer["seconds"])
        _same(job, "fabric", equal)
        stats = answer["stats"]
        stages = [f"{stage} after {1e3 * at:.1f}" for stage, at in report.times.items()]
        parts = [f"{part} {1e3 * stats[part]:.1f}" for part in ("seconds", "prepare", "waiting")]
        note(f"the last one, in ms: {', '.join(stages)}; of that the trainer's {', '.join(parts)}")
        if not equal["fabric"]:
            raise BackendError("what was committed is not what the trainer has")
        limits = [job.all(job.trainers, "limit", 300.0)[0]["seconds"] for _ in range(rounds)]
        if setup.baselines:
            for way, times in (("rank0", 1), ("ipc", rounds + 1)):
                note(f"{way} ...")
                job.all(job.receivers, "spoil")
                found = []
                for _ in range(times):
                    answers = job.all([*job.trainers, *job.receivers], way, 120.0)
                    found.append(max(each["seconds"] for each in answers))
                    problem = "; ".join(each["error"] for each in answers if "error" in each)
                    if problem:
                        break
                if problem:
                    note(f"{way} cannot be measured here: {problem}")
                    break  # the processes do not agree any more about what comes next
                note(f"{way}: {', '.join(f'{took:.3f}' for took in found)} s")
                seconds[way] = found[1:] or found
                _same(job, way, equal)
        wanted = int(plan.nbytes.sum())
    ours = statistics.median(seconds["fabric"])
    limit = statistics.median(limits)
    rate = setup.model.nbytes / limit / 1e9
    return RlBench(
        trainers=1,
        tp=1,
        receivers=1,
        model_bytes=setup.model.nbytes,
        bytes=wanted,
        straight=stats["straight"] / max(stats["bytes"], 1),
        pieces=len(plan.pieces),
        plan_s=0.0,
        limits_gbyte_s={"host to device" if setup.offloaded else "device copy": rate},
        limit_gbyte_s=rate,
        peak_bytes=stats["peak"],
        ways=[
            Way(
                name=way, seconds=times, median_s=statistics.median(times), equal=equal[way],
                gbyte_s=wanted / statistics.median(times) / 1e9,
            )
            for way, times in seconds.items()
        ],
        of_limit=limit / ours,
        over_rank0=statistics.median(seconds["rank0"]) / ours if "rank0" in seconds else None,
        over_broadcast=None,
    )  # fmt: skip


def _same(job: Job, way: str, equal: dict[str, bool]) -> None:
    there, here = (job.all(side, "digests", 300.0)[0]["digests"] for side in (job.trainers, job.receivers))
    equal[way] = there == here
