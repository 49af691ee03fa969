"""What the tests of faults share: jobs of processes that start fast, pushes with a fault, and what must be so after."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fabric_rlweights.job.launch import Child, Job, Setup
from fabric_rlweights.job.model import Model

__all__ = ["SLACK", "Answers", "check", "committed", "not_committed", "push", "setup", "start", "states", "stopped"]

MODEL = Model(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, inner=96, vocab=101)
FAULTY = str(Path(__file__).parent / "faulty_trainer.py")
SLACK = 8.0  # seconds beyond a deadline: the machine of a CI job is busy
Answers = list[dict[str, Any]]


def setup(**more: Any) -> Setup:
    return Setup(MODEL, **{"trainers": 2, "receivers": 2, "tp": 1, "trainer": FAULTY, **more})


def start(**more: Any) -> Job:
    return Job(setup(**more))


def push(job: Job, version: int, *, seconds: float = 60.0, only: list[int] | None = None, **more: Any) -> Answers:
    """All trainers push (or `only` those ranks); returns the answers of those that can answer."""
    job.all(job.trainers, "fill", version=version)
    pushing = [child for child in job.trainers if only is None or child.rank in only]
    for child in pushing:
        child.tell("push", version=version, seconds=seconds, **more)
    gone = more.get("victim") if more.get("fault") in ("kill", "stop") else None
    begin = time.monotonic()
    answers = [child.hear(seconds + SLACK) for child in pushing if child.rank != gone]
    assert time.monotonic() - begin < seconds + SLACK
    return answers


def states(job: Job) -> Answers:
    return job.all(job.receivers, "state")


def check(children: list[Child], version: int) -> None:
    """These receivers serve exactly that version."""
    for child in children:
        child.tell("check", version=version)
    for child in children:
        answer = child.hear(60.0)
        assert answer["wrong"] == []
        assert answer["serving"]
        assert answer["version"] == version


def committed(job: Job, version: int, **more: Any) -> None:
    answers = push(job, version, **more)
    reasons = [answer["reason"] for answer in answers if not answer["committed"]]
    assert not reasons, reasons
    check(job.receivers, version)


def not_committed(answers: Answers, *culprits: str) -> None:
    for answer in answers:
        assert not answer["committed"]
        assert answer["culprits"]
        if culprits:
            assert answer["culprits"] == list(culprits), answer["reason"]


def stopped(child: Child, timeout: float = 60.0) -> bool:
    """Wait until a process stands still (SIGSTOP)."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if Path(f"/proc/{child.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False
