"""Real processes to which things happen: an update is committed, or not, by whom, in time; the next one works."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fabric_rlweights.job.launch import Job, Setup
from fabric_rlweights.job.model import Model

MODEL = Model(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, inner=96, vocab=101)
FAULTY = str(Path(__file__).parent / "faulty_trainer.py")
SLACK = 30.0  # seconds beyond a deadline: the machine of a CI job is busy


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_HEARTBEAT", "5")  # a busy machine may hold a process back for seconds


def start(**more: Any) -> Job:
    return Job(Setup(MODEL, **{"trainers": 2, "receivers": 2, "tp": 1, "trainer": FAULTY, **more}))


def push(job: Job, version: int, *, seconds: float = 60.0, **more: Any) -> list[dict[str, Any] | str]:
    """All trainers push; returns their answers, or what came instead."""
    job.all(job.trainers, "fill", version=version)
    for child in job.trainers:
        child.tell("push", version=version, seconds=seconds, **more)
    begin = time.monotonic()
    answers: list[dict[str, Any] | str] = []
    for child in job.trainers:
        if child.rank == more.get("victim") and more.get("fault") in ("kill", "stop"):
            continue
        answers.append(child.hear(seconds + SLACK))
    assert time.monotonic() - begin < seconds + SLACK
    return answers


def states(job: Job) -> list[dict[str, Any]]:
    return job.all(job.receivers, "state")


def committed(job: Job, version: int) -> None:
    answers = push(job, version)
    reasons = [a if isinstance(a, str) else a["reason"] for a in answers if isinstance(a, str) or not a["committed"]]
    assert not reasons, reasons
    for answer in job.all(job.receivers, "check", version=version):
        assert answer["wrong"] == []
        assert answer["serving"]
        assert answer["version"] == version


def not_committed(answers: list[dict[str, Any] | str], *culprits: str) -> None:
    for answer in answers:
        assert isinstance(answer, dict)
        assert not answer["committed"]
        assert answer["culprits"]
        if culprits:
            assert answer["culprits"] == list(culprits), answer["reason"]


def test_caches_are_reset_and_a_lost_or_doubled_write_is_not_committed() -> None:
    with start() as job:
        for version in (1, 2):
            committed(job, version)
        calls = states(job)[0]["calls"]
        assert calls == [f"{what} {version}" for version in (1, 2) for what in ("pause", "reset", "resume")]
        for version, fault in ((3, "drop"), (5, "double")):
            not_committed(push(job, version, seconds=12.0, fault=fault, victim=1))
            assert any(not state["serving"] for state in states(job))
            committed(job, version + 1)


def test_digests_find_what_counting_cannot_and_the_old_version_is_served_on() -> None:
    with start(digests=True, double_buffer=True) as job:
        committed(job, 1)
        answers = push(job, 2, fault="swap", victim=0)
        not_committed(answers)
        assert all(isinstance(a, dict) and "does not hold what was sent" in a["reason"] for a in answers), answers
        for answer in job.all(job.receivers, "check", version=1):
            assert answer["wrong"] == []
            assert answer["serving"]
        committed(job, 3)


@pytest.mark.timeout(300)
def test_replicas_take_over_from_a_trainer_that_is_killed_and_from_one_that_stands_still() -> None:
    with start(trainers=4, replicate=2) as job:
        committed(job, 1)
        not_committed(push(job, 2, fault="kill", victim=1), "trainer 1")
        assert not any(state["serving"] for state in states(job))
        job.trainers.pop(1).close()
        committed(job, 3)
        not_committed(push(job, 4, seconds=12.0, fault="stop", victim=2), "trainer 2")
        still = next(child for child in job.trainers if child.rank == 2)
        job.trainers.remove(still)
        committed(job, 5)
        os.kill(still.process.pid, signal.SIGCONT)  # it goes on with version 4, to memory that is registered anew
        assert not still.hear(100.0)["committed"]
        for answer in job.all(job.receivers, "check", version=5):
            assert answer["wrong"] == []
        still.tell("exit")
        still.close()


@pytest.mark.timeout(300)
def test_ranks_come_back_and_a_late_receiver_gets_the_current_version_from_its_peer() -> None:
    with start() as job:
        not_committed(push(job, 1, fault="kill", victim=0), "trainer 0")
        job.trainers.pop(0).close()
        answers = push(job, 2, seconds=10.0)  # nobody else has its shards
        assert all(isinstance(a, dict) and not a["committed"] and "trainer 0" in a["culprits"] for a in answers), (
            answers
        )
        job.trainers.insert(0, job.start("trainer", 0))
        job.trainers[0].hear(60.0)
        committed(job, 3)

        gone = job.receivers.pop(1)
        gone.process.kill()
        gone.process.wait()
        answers = push(job, 4)
        if not all(isinstance(a, dict) and a["committed"] for a in answers):  # else it was known before
            not_committed(answers, "receiver 1")
        committed(job, 5)
        # A second data-parallel replica of rank 0, with the same tensors: its weights come from its peer.
        late = job.start("receiver", 2)
        late.hear(60.0)
        late.tell("wait", version=5, seconds=60.0)
        assert late.hear(70.0)["there"]
        late.tell("check", version=5)
        answer = late.hear(30.0)
        assert answer["wrong"] == []
        assert answer["serving"]
        assert states(job)[0]["calls"].count("pause 5") == 1  # nobody was stopped for it
        late.tell("exit")
        late.close()
        gone.close()
