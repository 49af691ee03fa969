"""The trainer side: every rank calls `push(version)` when its weights are ready, and hears how it ended.

trainer = Trainer(engine, table, buffers, controller="local:rl")
outcome = trainer.push(7, timeout=30)       # on every rank, like a collective; but it ends by its deadline
outcome.committed, outcome.culprits, outcome.reason
"""

from __future__ import annotations

import logging
import math
import numbers
import operator
import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fabric_core import ConfigError, DeadlineExceeded, FabricError, MrDesc, NetAddr, TransferEngine
from fabric_rlweights.channel import Channel, Event, Lost, address
from fabric_rlweights.meta import TrainerTable
from fabric_rlweights.protocol import (
    Abort,
    Assign,
    Call,
    Go,
    Hello,
    Here,
    Leave,
    Offer,
    Quiet,
    Result,
    Sent,
    Stop,
)
from fabric_rlweights.route import Route
from fabric_rlweights.sender import Links, Sender, SentStats

__all__ = ["Outcome", "Trainer"]

log = logging.getLogger("fabric.rlweights")
_SLACK = 1.0  #: seconds beyond the deadline until the controller's word is given up
_LONGEST = 86400.0  #: seconds of an update: one day
_REMEMBERED = 64  #: attempts that were broken off


@dataclass(frozen=True)
class Outcome:
    """How an update ended."""

    version: int
    committed: bool
    reason: str = ""  #: why not
    culprits: tuple[str, ...] = ()  #: "trainer 3", "receiver 1", "controller"
    seconds: float = 0.0
    stats: SentStats = field(default_factory=SentStats)  #: this rank's part


class _Broken(Exception):
    """Another rank failed, so the update was broken off; or this one is being closed."""


class _Over:
    """A word to the thread that pushes: there is nothing more to wait for."""


class Trainer:
    """One trainer rank. A context manager."""

    def __init__(
        self,
        engine: TransferEngine,
        table: TrainerTable,
        buffers: Sequence[Any],
        *,
        controller: NetAddr | str,
        watermark: int = 256 << 20,
    ) -> None:
        """Say hello to the controller.

        Args:
            buffers: the memory that the table's shards lie in, by number: contiguous CPU tensors or arrays, which stay
                where they are as long as this object lives.
            watermark: bytes of temporary memory, at most. Allocated once, when the first plan needs any.

        Raises ProtocolError for a controller's address that is none.
        """
        self.engine, self.table, self.rank = engine, table, table.rank
        self.controller, self.watermark = address(controller), watermark
        self._buffers = list(buffers)
        self._inbox: queue.Queue[Event | None] = queue.Queue()
        self._channel = Channel(engine, self._inbox)  # type: ignore[arg-type]
        self._sender: Sender | None = None
        self._descs: dict[bytes, MrDesc] = {}
        self._going: queue.Queue[Go | Result | Lost | Assign | _Over] = queue.Queue()
        self._over = ""  # why this object can push no more
        self._broken: dict[int, str] = {}  # attempt -> why
        self._state = threading.Lock()  # of the three below
        self._pushing = False  # a thread is in push(), and takes up plans itself
        self._writing: int | None = None  # the attempt that it writes for
        self._plan = -1
        self._ready = threading.Event()
        self._answered = threading.Event()  # the plan is taken up, or it is known why it cannot be
        self._idle = threading.Event()  # nobody is in push()
        self._idle.set()
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name=f"fabric-rl-trainer{self.rank}", daemon=True)
        self._thread.start()
        self._say_hello()

    def _say_hello(self) -> None:
        if self._over:
            return
        data = zlib.compress(self.table.model_dump_json().encode())
        self._channel.send(self.controller, Hello("trainer", self.rank, self.engine.address.to_bytes(), data))

    def close(self) -> None:
        """Leave, and tell the controller so. A push under way returns at once, not committed as far as it knows."""
        self._end("this trainer was closed")
        self._idle.wait(10.0)
        self._inbox.put(None)
        self._thread.join(10.0)
        if not self.engine.closed:
            leave = Leave("trainer", self.rank, self.engine.address.to_bytes())
            self._channel.send(self.controller, leave, timeout=1.0)
            self._channel.flush(1.0)
        self._channel.close()
        if self._sender is not None:
            self._sender.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wait_ready(self, timeout: float) -> None:
        """Wait until the plan is there. Raises ConfigError: it cannot be taken up; DeadlineExceeded: there is none."""
        self._answered.wait(timeout)
        if self._over or (self._answered.is_set() and not self._ready.is_set()):
            raise ConfigError(f"trainer {self.rank}: {self._over or self.problem}")
        if not self._ready.is_set():
            text = (
                f"trainer {self.rank}: no plan from the controller within {timeout:g} s: {self.problem or 'is it up?'}"
            )
            raise DeadlineExceeded(text, op="plan", code="ETIME")

    def push(
        self, version: int, *, timeout: float = 60.0, progress: Callable[[int, int], None] | None = None
    ) -> Outcome:
        """Take part in an update; returns within `timeout` seconds and a moment, whatever happens.

        The weights must not change meanwhile. `progress(done, all)` counts this rank's bytes.

        Args:
            version: a whole number from 0 on, below 2**63.
            timeout: seconds, above 0 and at most 86400 (a day).

        Raises ConfigError for other values of these.
        """
        version, timeout = _checked(version, timeout)
        begin = time.monotonic()
        deadline = begin + timeout
        stats = SentStats()

        def over(committed: bool, reason: str, culprits: Sequence[str]) -> Outcome:
            return Outcome(version, committed, reason, tuple(culprits), time.monotonic() - begin, stats)

        self._answered.wait(timeout)
        if self._over:
            return over(False, self._over, [f"trainer {self.rank}"])
        if not self._answered.is_set():
            return over(False, self.problem or "there is no plan yet: not everybody has said hello", ["controller"])
        if not self._ready.is_set():
            return over(False, self.problem, [f"trainer {self.rank}"])
        with self._state:
            if self._pushing:
                raise RuntimeError(f"trainer {self.rank}: push() is called by two threads")
            self._pushing = True
            self._idle.clear()
        try:
            self._catch_up()
            self._offer(version, deadline)
            while True:
                if self.over:
                    return over(False, self.over, [f"trainer {self.rank}"])
                try:
                    word = self._going.get(timeout=max(0.0, deadline + _SLACK - time.monotonic()))
                except queue.Empty:
                    return over(False, "the controller said nothing until the deadline: in doubt", ["controller"])
                if isinstance(word, Lost):
                    return over(False, f"the controller is gone: {word.reason}: in doubt", ["controller"])
                if isinstance(word, Result) and word.version == version:
                    return over(word.committed, word.reason, word.culprits)
                if isinstance(word, Go) and word.version == version:
                    stats = self._write(word, progress)
                elif isinstance(word, Go):
                    self._refuse(word)
                elif isinstance(word, Assign):
                    self._assign(word)
                    self._offer(version, deadline)
        finally:
            with self._state:
                self._pushing = False
                self._catch_up()
                self._idle.set()

    def _catch_up(self) -> None:
        """What came for no push, or too late for one."""
        for word in self._drain():
            if isinstance(word, Assign):
                self._assign(word)
            elif isinstance(word, Go):
                self._refuse(word)

    def _refuse(self, go: Go) -> None:
        """Nobody pushes that version here any more: the others need not wait until the deadline to hear so."""
        sent = Sent(go.attempt, self.rank, f"push({go.version}) has returned here already", "", {}, 0)
        self._channel.send(self.controller, sent)

    @property
    def over(self) -> str:
        """Why this object pushes no more: it was closed, or another one is this rank now. Empty: it does."""
        return self._over

    def _end(self, reason: str) -> None:
        """Push no more, and break off what is under way."""
        with self._state:
            self._over = self._over or reason
            if self._sender is not None:
                self._sender.wake.set()
        self._going.put(_Over())
        self._answered.set()

    def _drain(self) -> list[Go | Result | Lost | Assign | _Over]:
        found = []
        while not self._going.empty():
            found.append(self._going.get_nowait())
        return found

    def _offer(self, version: int, deadline: float) -> None:
        if self._sender is None:
            return  # the controller has heard why
        magnitudes = self._sender.magnitudes
        imm, left = magnitudes.begin(), max(0.0, deadline - time.monotonic())
        self._channel.send(
            self.controller, Offer(self.rank, version, left, self._plan, imm, magnitudes.desc.to_bytes())
        )

    def _write(self, go: Go, progress: Callable[[int, int], None] | None) -> SentStats:
        assert self._sender is not None
        with self._state:
            if go.attempt in self._broken:
                return SentStats()
            self._writing = go.attempt
            self._sender.wake.clear()
        deadline = time.monotonic() + go.seconds
        stats, problem, culprit = SentStats(), "", ""
        try:
            links = _links(go, self._descs)
            stats = self._sender.run(links, deadline, check=self._check, digests=go.digests, progress=progress)
        except _Broken:
            pass  # whoever broke it has told the controller
        except (FabricError, TimeoutError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
            culprit = str(getattr(error, "peer", None) or "")
        except Exception as error:
            log.exception("trainer %d: update %d", self.rank, go.version)
            problem = f"{type(error).__name__}: {error}"
        except BaseException as error:  # Ctrl-C, or an exit: the others need not wait until the deadline
            with self._state:
                self._writing = None
            self._sender.magnitudes.renew()
            sent = Sent(go.attempt, self.rank, f"push() was left: {type(error).__name__}", "", {}, 0)
            self._channel.send(self.controller, sent)
            raise
        with self._state:
            self._writing = None
            broken = go.attempt in self._broken or bool(self._over)
        if problem or broken:
            self._sender.magnitudes.renew()
        if broken:
            self._channel.send(self.controller, Quiet("trainer", go.attempt, self.rank))
        else:
            sums = stats.digests
            self._channel.send(self.controller, Sent(go.attempt, self.rank, problem[:4000], culprit, sums, stats.bytes))
        return stats

    def _check(self) -> None:
        attempt = self._writing
        if self._over:
            raise _Broken(self._over)
        if attempt is not None and attempt in self._broken:
            raise _Broken(self._broken[attempt])

    # ---- the thread

    def _run(self) -> None:
        while (event := self._inbox.get()) is not None:
            try:
                self._hear(event)
            except Exception:
                log.exception("trainer %d: %s", self.rank, type(event).__name__)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Go):
            with self._state:
                if self._pushing:
                    self._going.put(event)
                else:
                    self._refuse(event)
        elif isinstance(event, Result):
            self._going.put(event)
        elif isinstance(event, Abort):
            with self._state:
                self._broken[event.attempt] = event.reason
                while len(self._broken) > _REMEMBERED:
                    del self._broken[next(iter(self._broken))]
                writing = self._writing == event.attempt
                if writing and self._sender is not None:
                    self._sender.wake.set()
            if not writing:  # else the thread that writes says so when it has stopped
                self._channel.send(self.controller, Quiet("trainer", event.attempt, self.rank))
        elif isinstance(event, Assign):
            with self._state:  # held until it is taken up: a push that begins meanwhile must offer the new plan
                if self._pushing:
                    self._going.put(event)
                else:
                    self._assign(event)
        elif isinstance(event, Call):
            self._say_hello()
        elif isinstance(event, Stop):
            log.error("trainer %d: %s", self.rank, event.reason)
            self._end(event.reason)
        elif isinstance(event, Lost) and event.addr.partition("#")[0] == str(self.controller).partition("#")[0]:
            self.problem = event.reason
            self._going.put(event)
            if not event.reason.startswith("Hello"):  # perhaps it was only slow: once more, not for ever
                self._say_hello()

    def _assign(self, message: Assign) -> None:
        problem = ""
        try:
            route = Route.from_wire(message.columns)
            if self._sender is not None:
                self._sender.close()
            self._sender = Sender(self.engine, self._buffers, route, watermark=self.watermark)
            self._plan = message.plan
        except Exception as error:
            log.exception("trainer %d cannot take up the plan", self.rank)
            self._sender = None
            problem = f"{type(error).__name__}: {error}"
        self.problem = problem
        if problem:
            self._ready.clear()
        else:
            self._ready.set()
        self._answered.set()
        self._channel.send(self.controller, Here("trainer", self.rank, message.plan, problem[:4000]))


def _checked(version: object, timeout: object) -> tuple[int, float]:
    """Raise ConfigError for what the protocol cannot carry, and for what would be no deadline."""
    try:
        number = -1 if isinstance(version, bool) else operator.index(version)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 63:
        raise ConfigError(f"push(version={version!r}): a whole number from 0 on, below 2**63")
    real = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
    seconds = float(timeout) if real else math.nan  # type: ignore[arg-type]
    if not 0.0 < seconds <= _LONGEST:
        raise ConfigError(f"push(timeout={timeout!r}): seconds, above 0 and at most {_LONGEST:g}")
    return number, seconds


def _links(go: Go, known: dict[bytes, MrDesc]) -> Links:
    """`known`: the descriptors of the update before, which the engine knows already; becomes those of this one."""
    blobs = {blob for descs in go.tensors.values() for blob in descs.values()}
    found = {blob: known.get(blob) or MrDesc.from_bytes(blob) for blob in blobs}
    known.clear()
    known.update(found)
    return Links(
        {rank: {number: found[blob] for number, blob in descs.items()} for rank, descs in go.tensors.items()},
        dict(go.imms),
        {rank: (MrDesc.from_bytes(blob), imm) for rank, (blob, imm) in go.trainers.items()},
        {rank: NetAddr.from_bytes(blob) for rank, blob in go.addrs.items()},
    )
