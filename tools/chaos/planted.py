"""Bugs on purpose, one per process, to see that a run notices each: `--plant`. What it must say stands beside each."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chaos.book import EDGE
from fabric_core import FabricError

if TYPE_CHECKING:
    from chaos.worker import Worker

__all__ = ["PLANTS", "plant"]

#: process -> bug, what the run says
PLANTS = {
    0: ("leak", "fds grew"),
    1: ("twice", "an operation ended twice"),
    2: ("never", "an operation did not end by its deadline"),
    3: ("payload", "the payload was not right when the expectation fired"),
    4: ("late", "a write landed in memory that had been taken back"),
    5: ("count", "an immediate came too often"),
    6: ("deaf", "a loss was not told"),
    7: ("deaf", "a loss was not told"),  # twice: it is seen only by who lives through somebody else's death
}
_RARELY = 100


def plant(worker: Worker, name: str) -> None:
    """Put a bug into a process; called for each engine that it opens."""
    bugs: dict[str, Callable[[Worker], None]] = {
        "leak": _leak, "twice": _twice, "never": _never, "payload": _payload, "late": _late, "count": _count,
        "deaf": _deaf,
    }  # fmt: skip
    bugs[name](worker)


def _leak(_worker: Worker) -> None:
    def leak() -> None:
        os.dup(0)
        _later(0.5, leak)

    leak()


def _later(seconds: float, do: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, do)
    timer.daemon = True
    timer.start()


def _twice(worker: Worker) -> None:
    ended, turn = worker.ledger._ended, itertools.count(1)

    def again(entry: Any, operation: Any) -> None:
        ended(entry, operation)
        if next(turn) % _RARELY == 0:
            ended(entry, operation)

    worker.ledger._ended = again  # type: ignore[method-assign]


def _never(worker: Worker) -> None:
    ended, turn = worker.ledger._ended, itertools.count(1)

    def swallow(entry: Any, operation: Any) -> None:
        if next(turn) % _RARELY:
            ended(entry, operation)

    worker.ledger._ended = swallow  # type: ignore[method-assign]


def _payload(worker: Worker) -> None:
    worker.life.pages[::512] = bytes(2048)


def _writes(worker: Worker, then: Callable[[Any, Any], None]) -> None:
    """After every hundredth write that a receiver asked for, `then(write, arguments)`."""
    engine, turn = worker.life.engine, itertools.count(1)
    write = engine.submit_single_write

    def also(*args: Any, **more: Any) -> Any:
        made = write(*args, **more)
        if args[1] is not None and args[0] > EDGE and next(turn) % (_RARELY // 10) == 0:
            then(write, args)
        return made

    engine.submit_single_write = also  # type: ignore[method-assign]


def _late(worker: Worker) -> None:
    def then(write: Any, args: Any) -> None:
        def again() -> None:
            try:
                write(args[0], None, args[2], args[3])
            except FabricError:  # its engine was closed meanwhile
                return

        _later(0.4, again)

    _writes(worker, then)


def _count(worker: Worker) -> None:
    _writes(worker, lambda write, args: write(0, args[1], args[2], args[3]))


def _deaf(worker: Worker) -> None:
    worker.life.engine.on_peer_lost = None
