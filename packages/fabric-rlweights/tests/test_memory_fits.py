"""Memory that is not as its table says is refused, and what is handed out lives as long as somebody holds it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import gc

import numpy as np
import pytest
from oracle import plain
from pydantic import ValidationError
from small_world import N, Noted, engine_table, small, trainer_table

from fabric_core import BadRange, ConfigError, TransferEngine
from fabric_rlweights.memory import Span
from fabric_rlweights.meta import EngineTable, Entry, Shard
from fabric_rlweights.receiver import Receiver
from fabric_rlweights.trainer import Trainer


@pytest.mark.parametrize(
    "given",
    [
        np.zeros((N, N), np.float64),
        np.zeros((N, N), np.float16),
        np.zeros((N, N), np.uint16).T,
        np.zeros((N // 2, N), np.uint16),
        np.zeros((N, 2 * N), np.uint16)[:, ::2],
        [[0] * N] * N,
    ],
    ids=["wider", "another type of that width", "F order", "too short", "gaps", "no memory"],
)
def test_memory_that_is_not_as_the_table_says_is_refused(given: object) -> None:
    with TransferEngine.open() as engine, pytest.raises(BadRange) as raised:
        Receiver(engine, engine_table(0), {"w": given}, controller="local:nobody")
    if not isinstance(given, list):
        assert "float64" in str(raised.value) or "(64, 64)" in str(raised.value)
        assert "w is" in str(raised.value)


def test_read_only_memory_is_refused() -> None:
    given = np.zeros((N, N), np.uint16)
    given.flags.writeable = False
    with TransferEngine.open() as engine, pytest.raises(BadRange, match="read-only"):
        Receiver(engine, engine_table(0), {"w": given}, controller="local:nobody")


@pytest.mark.parametrize("turned", [False, True], ids=["as it lies", "packed"])
def test_a_buffer_shorter_than_its_shard_is_refused_before_any_update(turned: bool) -> None:
    """What is packed is read by numpy, which would read beyond the buffer."""
    tensor = plain("w", (N, N), "bfloat16")
    entry = Entry(param="w", start=(0, 0), size=(N, N), tensor="w", at=(0, 0), axes=(1, 0) if turned else (0, 1))
    with small() as job:
        job.receiver(EngineTable(rank=0, tensors=(tensor,), entries=(entry,)))
        with TransferEngine.open() as engine:
            short = [np.zeros((N - 1, N), np.uint16)]
            with Trainer(engine, trainer_table(0, 1), short, controller=job.engine.address) as trainer:
                with pytest.raises(ConfigError, match=r"bytes 0\.\.8192 of buffer 0, which has 8064"):
                    job.controller.wait_ready(60)
                with pytest.raises(ConfigError, match="buffer 0"):  # the trainer knows too, and does not wait
                    trainer.wait_ready(60)
                outcome = trainer.push(1, timeout=60)
    assert not outcome.committed
    assert outcome.culprits == ("trainer 0",)
    assert outcome.seconds < 60


@pytest.mark.parametrize("strides", [(-128, 2), (129, 2), (1 << 62, 2)])
def test_strides_that_no_memory_of_ours_has(strides: tuple[int, int]) -> None:
    with pytest.raises(ValidationError, match="strides"):
        Shard(param="w", shape=(N, N), dtype="bfloat16", start=(0, 0), size=(N, N), buffer=0, offset=0, strides=strides)


def test_bytes_keep_the_memory_that_they_are_of() -> None:
    ended: list[str] = []

    class Owner:
        def __init__(self) -> None:
            self.array = np.arange(16, dtype=np.uint8)

        def __del__(self) -> None:
            ended.append("owner")

    owner = Owner()
    data = Span(owner.array.__array_interface__["data"][0], 16, owner).bytes()
    del owner
    gc.collect()
    assert not ended
    assert (data == np.arange(16)).all()
    del data
    gc.collect()
    assert ended


def test_weights_that_the_engine_was_given_outlive_replans_and_the_receiver() -> None:
    hooks = Noted()
    with small() as job:
        job.trainer()
        receiver = job.receiver(0, hooks=hooks, double_buffer=True)
        job.commit(1)
        held, mine = hooks.used["w"], receiver.tensors["w"]
        job.receiver(1)  # a replan
        job.controller.wait_ready(60)
        job.commit(2)
        new = hooks.used["w"]
        receiver.close()
        receiver.engine.close()
        del receiver
        gc.collect()
        assert (new.view(np.uint16) == 2).all()
        assert held.sum() == mine.sum()  # can be read: it is the buffer that the next update would go to
