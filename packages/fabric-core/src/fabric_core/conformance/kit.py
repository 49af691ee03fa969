"""What a test of the kit works with: the chosen backend, memory with a known content, and waits that end.

Nothing in the kit waits without a deadline, and nothing sleeps in order to synchronise.
"""

from __future__ import annotations

import base64
import functools
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from fabric_core import NetAddr, TransferEngine, TransferError
from fabric_core.operations import Operation

DEADLINE = 20.0  # seconds: the longest that anything may take which is meant to work
GUARD = b"\xa5"  # fills memory that nobody may touch

E = TypeVar("E", bound=BaseException)


@dataclass(frozen=True)
class Kit:
    """The command line of this run."""

    backend: str
    scale: str
    seed: int
    slack: float
    nics: tuple[int, ...] = (1,)
    imports: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def scaled(self, quick: int, normal: int, long: int) -> int:
        return {"quick": quick, "normal": normal, "long": long}[self.scale]

    def needs_nics(self, count: int) -> None:
        if count > max(self.nics):
            pytest.skip(f"needs {count} NICs, --fabric-nics allows {max(self.nics)}")

    def open(self, *, nics: int = 1, name: str | None = None, **settings: Any) -> TransferEngine:
        return TransferEngine.open("cpu", self.backend, nics=nics, name=name, **{**self.settings, **settings})


@dataclass(frozen=True)
class Pair:
    """Two engines in this process: `a` mostly sends, `b` mostly receives."""

    a: TransferEngine
    b: TransferEngine


@functools.lru_cache(maxsize=64)
def pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that tell their place and origin; the same in every process."""
    return random.Random(seed).randbytes(nbytes)


class Memory:
    """A registered region. `shared`: memory of `engine.empty()`, else the heap's."""

    def __init__(
        self, engine: TransferEngine, nbytes: int, fill: bytes = b"", *, shared: bool = True, write: bool = True
    ) -> None:
        self.buffer: Any = engine.empty(nbytes) if shared else bytearray(nbytes)
        self.nbytes = nbytes
        if fill:
            self.put(fill * (nbytes // len(fill)) if len(fill) == 1 else fill)
        self.handle, self.desc = engine.reg_mr(self.buffer, write=write)
        self.blob = base64.b64encode(self.desc.to_bytes()).decode()  #: the descriptor for a peer's process

    def put(self, data: bytes, offset: int = 0) -> None:
        with memoryview(self.buffer) as view:
            view[offset : offset + len(data)] = data

    def get(self, offset: int = 0, length: int | None = None) -> bytes:
        with memoryview(self.buffer) as view:
            return bytes(view[offset : self.nbytes if length is None else offset + length])


class Calls:
    """A callback that remembers how it was called."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.args: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        with self._changed:
            self.args.append(args)
            self._changed.notify_all()

    @property
    def count(self) -> int:
        return len(self.args)

    @property
    def firsts(self) -> list[Any]:
        return [args[0] for args in self.args]

    def wait(self, count: int = 1, timeout: float = DEADLINE) -> list[Any]:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.args) >= count, timeout):
                pytest.fail(f"{len(self.args)} of {count} calls of a callback within {timeout:g} s")
        return self.firsts


@dataclass
class Engines:
    """Opens engines in this process and closes them after the test, in order."""

    kit: Kit
    opened: list[TransferEngine] = field(default_factory=list)
    faults: dict[int, Calls] = field(default_factory=dict)

    def open(self, **how: Any) -> TransferEngine:
        engine = self.kit.open(**how)
        self.opened.append(engine)
        self.faults[id(engine)] = Calls()
        engine.on_error = self.faults[id(engine)]
        return engine

    def pair(self, a: int = 1, b: int = 1, **settings: Any) -> Pair:
        """Two engines with that many NICs each."""
        return Pair(self.open(nics=a, **settings), self.open(nics=b, **settings))

    def errors(self, engine: TransferEngine) -> Calls:
        """What was reported to this engine's on_error."""
        return self.faults[id(engine)]

    def close(self) -> None:
        for engine in reversed(self.opened):
            engine.close()
        assert all(engine.closed for engine in self.opened)


def after(call: Callable[[Any], object], value: Any) -> Callable[[object], object]:
    """An on_done that calls with this value instead of the operation."""
    return lambda _operation: call(value)


def common_imm(*engines: TransferEngine, tries: int = 64) -> int:
    """An immediate that each of these engines allocated: a scatter and a barrier have one for all their targets."""
    common: set[int] = set()
    offers: list[set[int]] = [set() for _ in engines]
    while not common and tries:
        for engine, offered in zip(engines, offers, strict=True):
            offered.add(engine.alloc_imm())
        common = set.intersection(*offers)
        tries -= 1
    assert common, "engines that did the same hand out the same immediates"
    for engine, offered in zip(engines, offers, strict=True):
        for imm in offered - {min(common)}:
            engine.free_imm(imm)
    return min(common)


def eventually(true: Callable[[], bool], what: str, timeout: float = DEADLINE) -> None:
    """Polls until `true()`; for facts that nobody announces."""
    end = time.monotonic() + timeout
    while not true():
        if time.monotonic() > end:
            pytest.fail(f"not within {timeout:g} s: {what}")
        time.sleep(0.001)


def finish(operations: Iterable[Operation], timeout: float = DEADLINE) -> None:
    """All of them end well, together within `timeout`."""
    end = time.monotonic() + timeout
    for operation in operations:
        operation.wait(max(0.0, end - time.monotonic()))


def fails(operation: Operation, kind: type[E], within: float) -> E:
    """The operation ends with this kind of error within that time, and stays so. Returns the error."""
    with pytest.raises(kind) as caught:
        operation.wait(within)
    error = operation.exception()
    assert operation.done
    assert type(error) is type(caught.value), "wait() and exception() disagree"
    assert operation.state == ("cancelled" if type(error).__name__ == "Cancelled" else "failed")
    return caught.value


def settle(operations: Iterable[Operation], timeout: float = DEADLINE) -> list[str]:
    """All of them end, well or badly, together within `timeout`. Returns their states."""
    operations = list(operations)
    end = time.monotonic() + timeout
    for operation in operations:
        try:
            operation.wait(max(0.0, end - time.monotonic()))
        except TransferError:
            pass
    return [operation.state for operation in operations]


def names(error: BaseException, address: NetAddr) -> bool:
    """Does the error say which peer it is about? By its whole address or by that of one of its NICs."""
    said = f"{error} {getattr(error, 'peer', '')}"
    _scheme, _colon, nics = str(address).partition(":")
    return any(nic in said for nic in nics.split(","))
