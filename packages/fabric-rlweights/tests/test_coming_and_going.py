"""Arguments that make no sense, objects that are closed in the middle of things, and two that say they are one rank."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import numpy as np
import pytest
from small_world import N, Noted, engine_table, memory, small, trainer_table, until

from fabric_core import ConfigError, ProtocolError, TransferEngine
from fabric_rlweights.controller import Controller
from fabric_rlweights.meta import Shard, TrainerTable
from fabric_rlweights.protocol import Go
from fabric_rlweights.receiver import Receiver
from fabric_rlweights.trainer import Trainer


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_HEARTBEAT", "5")


def test_versions_and_timeouts_that_make_no_sense_are_refused_and_hurt_nobody() -> None:
    with small() as job:
        trainer = job.trainer()
        receiver = job.receiver(0)
        job.commit(1)
        timeouts: list[Any] = [0, -1, float("nan"), float("inf"), 86401, "3", None, True]
        for timeout in timeouts:
            with pytest.raises(ConfigError, match=r"timeout=.*at most 86400"):
                trainer.push(2, timeout=timeout)
        versions: list[Any] = ["7", 1.5, None, True, -1, 1 << 63]
        for version in versions:
            with pytest.raises(ConfigError, match=r"version=.*whole number"):
                trainer.push(version, timeout=5)
        assert receiver.serving
        assert trainer.push(np.int64(2), timeout=np.float64(60.0)).committed  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, -1, "2", True, 1.0])
def test_a_controller_waits_for_a_whole_number_of_ranks(count: Any) -> None:
    with TransferEngine.open() as engine:
        with pytest.raises(ConfigError, match="trainers="):
            Controller(engine, trainers=count, receivers=1)
        with pytest.raises(ConfigError, match="receivers="):
            Controller(engine, trainers=1, receivers=count)


def test_an_address_that_is_none_is_refused_before_anything_is_started() -> None:
    threads = set(threading.enumerate())
    with TransferEngine.open() as engine:
        for _ in range(2):  # the engine can still be used
            with pytest.raises(ProtocolError, match="nonsense"):
                Trainer(engine, trainer_table(0, 1), [np.zeros((N, N), np.uint16)], controller="nonsense")
            with pytest.raises(ProtocolError, match="nonsense"):
                Receiver(engine, engine_table(0), memory(engine_table(0)), controller="nonsense")
        assert not [t.name for t in set(threading.enumerate()) - threads if t.name.startswith("fabric-rl")]


def test_a_watermark_that_is_too_small_is_said_at_once() -> None:
    with small() as job:
        job.receiver(0)
        shard = Shard(
            param="w", shape=(N, N), dtype="float32", start=(0, 0), size=(N, N), buffer=0, offset=0, strides=(4 * N, 4)
        )
        with (
            TransferEngine.open() as engine,
            Trainer(
                engine,
                TrainerTable(rank=0, shards=(shard,)),
                [np.zeros((N, N), np.float32)],
                controller=job.engine.address,
                watermark=1000,
            ) as trainer,
        ):
            with pytest.raises(ConfigError, match="the watermark is 960"):
                trainer.wait_ready(3600)
            outcome = trainer.push(1, timeout=3600)
            assert outcome.culprits == ("trainer 0",)
            assert "the watermark is 960" in outcome.reason


def test_who_leaves_is_not_waited_for_and_what_it_served_lives_on() -> None:
    with small(receivers=2) as job:
        job.trainer()
        stays, goes = job.receiver(0), job.receiver(1)
        job.commit(1)
        goes.close()  # its engine lives on
        member = job.controller._members.get("receiver", 1)
        assert member is not None
        until(lambda: member.left, "the controller has heard of it")
        job.commit(2)
        assert stays.serving
        assert stays.version == 2


def test_a_trainer_that_is_closed_ends_its_push() -> None:
    with small(trainers=2) as job:
        one = job.trainer(0, 2)
        job.trainer(1, 2)
        job.receiver(0)
        job.controller.wait_ready(120)
        attempt = job.controller._members.attempt
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(one.push(1, timeout=3600)))
        thread.start()
        until(lambda: job.controller._members.attempt > attempt, "the update is begun")
        one.close()
        thread.join(120)
        assert found
        assert found[0].reason == "this trainer was closed"
        report = job.controller.wait_report(1, 120)
        assert report.culprits == ["trainer 0"]
        assert "it has left" in report.reason
        assert not one.push(2).committed
        one.close()


def test_a_word_to_write_that_comes_after_the_push_is_answered() -> None:
    with small() as job:
        trainer = job.trainer()
        job.receiver(0)
        job.commit(1)
        told: list[Any] = []
        trainer._channel.send = lambda _addr, message, timeout=10.0: told.append(message)  # type: ignore[method-assign]
        trainer._hear(Go(77, 1, 60.0, False, {}, {}, {}, {}))
        assert [(message.attempt, message.problem) for message in told] == [(77, "push(1) has returned here already")]
        del trainer._channel.send  # type: ignore[method-assign]


def test_a_push_that_is_interrupted_is_over_for_everybody() -> None:
    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with small() as job:
        trainer = job.trainer()
        job.receiver(0)
        job.commit(1)
        with pytest.raises(KeyboardInterrupt):
            trainer.push(2, timeout=3600, progress=interrupt)
        report = job.controller.wait_report(2, 120)
        assert not report.committed
        assert report.culprits == ["trainer 0"]
        assert "KeyboardInterrupt" in report.reason
        job.commit(3)


def test_a_controller_that_is_closed_in_an_update_says_how_it_ended() -> None:
    hooks, go = Noted(), threading.Event()
    with small() as job:
        trainer = job.trainer()
        job.receiver(0, hooks=hooks)
        job.commit(1)
        entered = threading.Event()
        hooks.waits["pause"] = lambda: entered.set() or go.wait(200)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(trainer.push(2, timeout=3600)))
        thread.start()
        assert entered.wait(120)
        job.controller.close()
        thread.join(120)
        go.set()
        assert found
        assert "being closed" in found[0].reason
        assert found[0].culprits == ("controller",)


def test_the_second_of_two_with_one_rank_takes_over_and_the_first_stops() -> None:
    with small() as job:
        first_trainer = job.trainer()
        hooks = Noted()
        first = job.receiver(0, hooks=hooks)
        job.commit(1)
        second = job.receiver(0)
        until(lambda: not first.serving, "the first one is told")
        until(lambda: "pause 1" in hooks.calls, "its engine pauses")
        second_trainer = job.trainer()
        until(lambda: first_trainer._over, "so is the first trainer")
        outcome = first_trainer.push(2, timeout=3600)
        assert "trainer 0 has said hello from" in outcome.reason
        job.trainers.remove(first_trainer)
        job.commit(3)
        assert second.version == 3
        assert not first.serving
        assert second_trainer.problem == ""


def test_a_report_is_of_the_last_attempt() -> None:
    with small(trainers=2) as job:
        one, _other = job.trainer(0, 2), job.trainer(1, 2)
        job.receiver(0)
        job.controller.wait_ready(120)
        assert not one.push(1, timeout=2.0).committed
        assert not job.controller.wait_report(1, 120).committed
        attempt = job.controller._members.attempt
        thread = threading.Thread(target=lambda: one.push(1, timeout=100))
        thread.start()
        until(lambda: job.controller._members.attempt > attempt, "it is tried again")
        assert 1 not in job.controller.reports
        job.trainers.remove(one)
        job.commit(1)
        thread.join()
        assert job.controller.wait_report(1, 120).committed


def test_attempts_of_two_controllers_are_never_the_same() -> None:
    """A trainer remembers which ones were broken off, and a controller may be started anew under its old name."""
    numbers = []
    for _ in range(2):
        with small() as job:
            job.trainer()
            job.receiver(0)
            job.commit(1)
            numbers.append((job.controller._members.attempt, job.controller._members.number))
    assert numbers[0][0] < numbers[1][0]
    assert numbers[0][1] < numbers[1][1]
