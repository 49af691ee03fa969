"""Real processes to which things happen: an update is committed, or not, by whom, in time; the next one works."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import pytest
from fault_job import check, committed, not_committed, push, start, states, stopped


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_HEARTBEAT", "5")  # a busy machine may hold a process back for seconds


def test_caches_are_reset_and_a_lost_or_doubled_write_is_not_committed() -> None:
    with start() as job:
        for version in (1, 2):
            committed(job, version)
        calls = states(job)[0]["calls"]
        assert calls == [f"{what} {version}" for version in (1, 2) for what in ("pause", "reset", "resume")]
        for version, fault in ((3, "drop"), (5, "double")):
            answers = push(job, version, seconds=12.0, fault=fault, victim=1)
            if not answers[0]["committed"]:
                not_committed(answers)
            else:  # the one too many came last: whoever got it says so instead of serving
                assert fault == "double"
                assert "one was doubled" in answers[0]["reason"]
            assert any(not state["serving"] for state in states(job))
            committed(job, version + 1)


def test_digests_find_what_counting_cannot_and_the_old_version_is_served_on() -> None:
    with start(digests=True, double_buffer=True) as job:
        committed(job, 1)
        answers = push(job, 2, fault="swap", victim=0)
        not_committed(answers)
        assert all("does not hold what was sent" in answer["reason"] for answer in answers), answers
        check(job.receivers, 1)
        committed(job, 3)


def test_a_slow_trainer_and_another_order_of_writes_change_nothing_and_two_versions_at_once_are_refused() -> None:
    with start() as job:
        committed(job, 1, fault="reverse", victim=0)
        slow = job.trainers[1]
        job.all(job.trainers, "fill", version=2)
        for child in job.trainers:
            child.tell("push", version=2, seconds=100.0, fault="SIGSTOP", victim=1, pid=slow.process.pid)
        assert stopped(slow)
        os.kill(slow.process.pid, signal.SIGCONT)
        assert all(child.hear(110.0)["committed"] for child in job.trainers)
        check(job.receivers, 2)
        for child, version in zip(job.trainers, (3, 4), strict=True):
            child.tell("push", version=version, seconds=5.0)
        not_committed([child.hear(60.0) for child in job.trainers])
        assert not any(state["version"] in (3, 4) and state["serving"] for state in states(job))
        committed(job, 5)


@pytest.mark.timeout(300)
def test_a_receiver_stands_still_or_dies_in_the_middle_of_an_update() -> None:
    with start() as job:
        committed(job, 1)
        victim = job.receivers[1]
        answers = push(job, 2, seconds=12.0, fault="SIGSTOP", victim=0, pid=victim.process.pid)
        assert stopped(victim)
        not_committed(answers, "receiver 1")
        os.kill(victim.process.pid, signal.SIGCONT)
        for version in range(3, 23):  # it takes part again as soon as it has spoken
            assert all(answer["committed"] for answer in push(job, version))
            if job.controller.reports[version].receivers == [0, 1]:
                break
        check(job.receivers, version)

        answers = push(job, 30, fault="SIGKILL", victim=0, pid=victim.process.pid)
        not_committed(answers, "receiver 1")
        job.receivers.pop(1).close()
        assert not states(job)[0]["serving"]  # it was written to, in place
        committed(job, 31)


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
        # One that ends before anybody has written: memory must be registered anew all the same by the next one.
        not_committed(push(job, 5, seconds=5.0, only=[0]), "trainer 3")
        committed(job, 6)
        os.kill(still.process.pid, signal.SIGCONT)  # it goes on with version 4, to memory that cannot be reached so
        assert not still.hear(100.0)["committed"]
        check(job.receivers, 6)
        still.tell("exit")
        still.close()


@pytest.mark.timeout(300)
def test_ranks_come_back_and_a_late_receiver_gets_the_current_version_from_its_peer() -> None:
    with start() as job:
        not_committed(push(job, 1, fault="kill", victim=0), "trainer 0")
        job.trainers.pop(0).close()
        answers = push(job, 2, seconds=10.0)  # nobody else has its shards
        assert all(not answer["committed"] and "trainer 0" in answer["culprits"] for answer in answers), answers
        job.trainers.insert(0, job.start("trainer", 0))
        job.trainers[0].hear(60.0)
        committed(job, 3)

        gone = job.receivers.pop(1)
        gone.process.kill()
        gone.process.wait()
        answers = push(job, 4)
        if not all(answer["committed"] for answer in answers):  # else it was known before
            not_committed(answers, "receiver 1")
        committed(job, 5)
        # A second data-parallel replica of rank 0, with the same tensors: its weights come from its peer.
        late = job.start("receiver", 2)
        late.hear(60.0)
        late.tell("wait", version=5, seconds=60.0)
        assert late.hear(70.0)["there"]
        check([late], 5)
        assert states(job)[0]["calls"].count("pause 5") == 1  # nobody was stopped for it
        late.tell("exit")
        late.close()
        gone.close()
