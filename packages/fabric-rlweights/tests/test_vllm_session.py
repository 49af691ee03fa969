"""What a vLLM worker does in an update, with a model that is a dictionary: it gets whole versions, or none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from fabric_core import TransferEngine
from fabric_rlweights.controller import Controller
from fabric_rlweights.dtensor import table_of
from fabric_rlweights.trainer import Outcome, Trainer
from fabric_rlweights.vllm.session import Session, UpdateFailed

torch = pytest.importorskip("torch")

LIMIT = 60.0  # seconds: the longest that anything may take which is meant to work
SHAPES = {"embed": (40, 16), "layer.weight": (24, 16), "norm": (16,)}
PARAMS = {name: (shape, "bfloat16") for name, shape in SHAPES.items()}


@dataclass
class Job:
    """One trainer and one worker. `model` is what the worker has loaded."""

    weights: dict[str, Any]
    trainer: Trainer
    session: Session
    model: dict[str, Any] = field(default_factory=dict)
    loads: int = 0
    problem: Exception | None = None

    def load(self, weights: Iterator[tuple[str, Any]]) -> None:
        if self.problem is not None:
            raise self.problem
        self.model = {name: tensor.clone() for name, tensor in weights}
        self.loads += 1

    def fill(self, salt: int) -> dict[str, Any]:
        """Make the trainer's weights another version's, and return a copy."""
        generator = torch.Generator().manual_seed(salt)
        for tensor in self.weights.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        return {name: tensor.clone() for name, tensor in self.weights.items()}

    def update(self, version: int, timeout: float = LIMIT) -> Outcome:
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(self.session.apply, version, timeout)
            outcome = self.trainer.push(version, timeout=timeout)
            waiting.result()
        return outcome

    def patient(self, seconds: float) -> bool:
        """Whether the receiver goes on within so many seconds, though a load is under way."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.session._bridge._job is None:
                return True
            time.sleep(0.01)
        return False

    def has(self, wanted: dict[str, Any]) -> bool:
        return self.model.keys() == wanted.keys() and all(torch.equal(self.model[k], wanted[k]) for k in wanted)


@contextmanager
def a_job(patience: float = LIMIT) -> Iterator[Job]:
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    table, buffers = table_of(0, weights)
    with (
        TransferEngine.open() as engine,
        TransferEngine.open() as ours,
        Controller(engine, trainers=1, receivers=1),
        Trainer(ours, table, buffers, controller=engine.address) as trainer,
    ):
        held: list[Job] = []

        def load(found: Iterator[tuple[str, Any]]) -> None:
            held[0].load(found)

        session = Session(TransferEngine.open(), 0, PARAMS, str(engine.address), load, patience=patience)
        try:
            held.append(Job(weights, trainer, session))
            yield held[0]
        finally:
            session.close()


def test_ten_updates_there_and_back() -> None:
    with a_job() as job:
        versions = [job.fill(salt) for salt in (1, 2)]
        for version in range(1, 11):
            job.fill(1 + version % 2)
            assert job.update(version).committed
            assert job.has(versions[version % 2])
            assert job.loads == version


def test_an_update_that_fails_leaves_the_model_as_it_was() -> None:
    with a_job() as job:
        old = job.fill(1)
        assert job.update(1).committed
        job.fill(2)
        job.problem = RuntimeError("no memory today")
        with pytest.raises(UpdateFailed, match="no memory today"):
            job.update(2)
        assert job.has(old)
        job.problem = None
        new = job.fill(3)
        assert job.update(3).committed
        assert job.has(new)


def test_a_trainer_that_never_pushes_ends_at_the_deadline() -> None:
    with a_job() as job, pytest.raises(UpdateFailed, match=r"has not come within"):
        job.session.apply(1, 0.01 - 4.9)  # no more than the slack is left


def test_weights_that_nobody_waits_for_are_not_served() -> None:
    with a_job(patience=0.05) as job:
        job.fill(1)
        outcome = job.trainer.push(1, timeout=LIMIT)
        assert not outcome.committed or not job.session.receiver.serving
        assert not job.model


def test_a_version_that_was_given_up_is_not_loaded_when_the_next_one_is_written_over_it() -> None:
    with a_job(patience=0.05) as job:
        job.fill(1)
        assert job.trainer.push(1, timeout=LIMIT).culprits == ("receiver 0",)  # nobody called: it was given up
        with pytest.raises(UpdateFailed, match="version 2 has not come"):
            job.session.apply(2, 0.01 - 4.9)
        assert job.loads == 0, "memory that the next update may write to was loaded"


def test_a_load_that_takes_long_is_waited_for() -> None:
    with a_job(patience=0.05) as job, ThreadPoolExecutor(1) as thread:
        go, loading = threading.Event(), threading.Event()
        real = job.load

        def slowly(weights: Iterator[tuple[str, Any]]) -> None:
            loading.set()
            assert go.wait(LIMIT)
            real(weights)

        job.load = slowly  # type: ignore[method-assign]
        new = job.fill(1)
        waiting = thread.submit(job.session.apply, 1, LIMIT)
        pushing = threading.Thread(target=job.trainer.push, args=(1,), kwargs={"timeout": LIMIT})
        pushing.start()
        assert loading.wait(LIMIT)
        assert not job.patient(0.5), "the receiver took its memory back from a load that went on"
        go.set()
        waiting.result()
        pushing.join()
        assert job.has(new)
        assert job.session.receiver.serving


def test_a_worker_that_is_shut_down_waits_for_no_call() -> None:
    with a_job(patience=10 * LIMIT) as job:
        job.fill(1)
        pushing = threading.Thread(target=job.trainer.push, args=(1,), kwargs={"timeout": 5.0})
        pushing.start()
        assert job.session._events.get(timeout=LIMIT).version == 1
        job.session.close()
        assert not job.session.receiver._thread.is_alive()
        pushing.join()
