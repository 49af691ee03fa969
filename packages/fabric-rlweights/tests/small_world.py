"""A job in one process: trainers that hold rows of 64 x 64 bfloat16 parameters, receivers that want all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from oracle import place, plain

from fabric_core import TransferEngine
from fabric_rlweights.controller import Controller
from fabric_rlweights.hooks import Hooks
from fabric_rlweights.meta import EngineTable, Layout, Shard, TrainerTable
from fabric_rlweights.receiver import Receiver
from fabric_rlweights.trainer import Outcome, Trainer

__all__ = ["Noted", "Small", "engine_table", "memory", "small", "trainer_table", "until"]

N = 64


class Noted(Hooks):
    """Writes down what is called; `waits[what]`, if there is one, is called first."""

    def __init__(self, calls: list[str] | None = None, name: str = "") -> None:
        self.calls = [] if calls is None else calls
        self.name, self.waits, self.made, self.used = name, {}, {}, {}
        self.waits: dict[str, Callable[[], object]]
        self.made: dict[str, np.ndarray]
        self.used: dict[str, np.ndarray]

    def _note(self, what: str, version: int) -> None:
        if what in self.waits:
            self.waits[what]()
        self.calls.append(f"{self.name}{what} {version}")

    def pause(self, version: int) -> None:
        self._note("pause", version)

    def resume(self, version: int) -> None:
        self._note("resume", version)

    def reset_caches(self, version: int) -> None:
        self._note("reset", version)

    def told(self, version: int, committed: bool, reason: str) -> None:
        self._note("told", version)

    def exchange(self, tensors: dict[str, Any]) -> None:
        self.used = tensors

    def finish(self, name: str, data: Any) -> None:
        self.made[name] = data.view(np.uint16).copy()

    def load(self, name: str, data: Any) -> None:
        self.made[name] = data.view(np.uint16).copy()


def trainer_table(rank: int, ranks: int, names: tuple[str, ...] = ("w",)) -> TrainerTable:
    rows = N // ranks
    shards = [
        Shard(
            param=name, shape=(N, N), dtype="bfloat16", start=(rank * rows, 0), size=(rows, N), buffer=k, offset=0,
            strides=(2 * N, 2),
        )
        for k, name in enumerate(names)
    ]  # fmt: skip
    return TrainerTable(rank=rank, shards=tuple(shards))


def engine_table(rank: int, names: tuple[str, ...] = ("w",), layout: Layout = "direct") -> EngineTable:
    return EngineTable(
        rank=rank,
        tensors=tuple(plain(name, (N, N), "bfloat16", layout=layout) for name in names),
        entries=tuple(place(name, name, (0, 0), (N, N), (0, 0)) for name in names),
    )


def memory(table: EngineTable) -> dict[str, np.ndarray]:
    return {t.name: np.zeros(t.shape, np.uint16) for t in table.tensors}


def until(true: Callable[[], object], what: str) -> None:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.005)


class Small:
    """A controller and whoever was added."""

    def __init__(self, stack: ExitStack, **more: Any) -> None:
        self._stack = stack
        self.engine = self._open()
        self.controller: Controller = stack.enter_context(Controller(self.engine, **more))
        self.trainers: list[Trainer] = []

    def _open(self) -> TransferEngine:
        return self._stack.enter_context(TransferEngine.open())

    def trainer(self, rank: int = 0, ranks: int = 1, names: tuple[str, ...] = ("w",), **more: Any) -> Trainer:
        buffers = [np.zeros((N // ranks, N), np.uint16) for _ in names]
        table = trainer_table(rank, ranks, names)
        made = self._stack.enter_context(Trainer(self._open(), table, buffers, controller=self.engine.address, **more))
        self.trainers.append(made)
        return made

    def receiver(self, table: EngineTable | int, given: Any = None, **more: Any) -> Receiver:
        table = engine_table(table) if isinstance(table, int) else table
        given = memory(table) if given is None else given
        return self._stack.enter_context(Receiver(self._open(), table, given, controller=self.engine.address, **more))

    def push(self, version: int, timeout: float = 60.0) -> list[Outcome]:
        """All trainers push weights that are all `version`."""
        found: dict[int, Outcome] = {}

        def one(trainer: Trainer) -> None:
            for buffer in trainer._buffers:
                buffer[...] = version
            found[trainer.rank] = trainer.push(version, timeout=timeout)

        threads = [threading.Thread(target=one, args=(trainer,)) for trainer in self.trainers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[trainer.rank] for trainer in self.trainers]

    def commit(self, version: int) -> None:
        for outcome in self.push(version):
            assert outcome.committed, outcome
            assert not outcome.culprits, outcome


@contextmanager
def small(**more: Any) -> Iterator[Small]:
    """A job; `more`: for the controller, which waits for one of each unless told otherwise."""
    with ExitStack() as stack:
        yield Small(stack, **{"trainers": 1, "receivers": 1, **more})
