"""The trainer side: every rank calls `push(version)` when its weights are ready, and hears how it ended.

trainer = Trainer(engine, table, buffers, controller="local:rl")
outcome = trainer.push(7, timeout=30)       # on every rank, like a collective; but it ends by its deadline
outcome.committed, outcome.culprits, outcome.reason
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fabric_core import DeadlineExceeded, FabricError, MrDesc, NetAddr, TransferEngine
from fabric_rlweights.channel import Channel, Event, Lost
from fabric_rlweights.meta import TrainerTable
from fabric_rlweights.protocol import Abort, Assign, Go, Hello, Here, Offer, Quiet, Result, Sent
from fabric_rlweights.route import Route
from fabric_rlweights.sender import Links, Sender, SentStats

__all__ = ["Outcome", "Trainer"]

log = logging.getLogger("fabric.rlweights")
_SLACK = 1.0  #: seconds beyond the deadline until the controller's word is given up


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
    """Another rank failed, so the update was broken off."""


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
        """
        self.engine, self.table, self.rank = engine, table, table.rank
        self.controller, self.watermark = controller, watermark
        self._buffers = list(buffers)
        self._inbox: queue.Queue[Event | None] = queue.Queue()
        self._channel = Channel(engine, self._inbox)  # type: ignore[arg-type]
        self._sender: Sender | None = None
        self._going: queue.Queue[Go | Result | Lost | Assign] = queue.Queue()
        self._broken: dict[int, str] = {}  # attempt -> why
        self._state = threading.Lock()  # of the three below
        self._pushing = False  # a thread is in push(), and takes up plans itself
        self._writing: int | None = None  # the attempt that it writes for
        self._plan = -1
        self._ready = threading.Event()
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name=f"fabric-rl-trainer{self.rank}", daemon=True)
        self._thread.start()
        self._say_hello()

    def _say_hello(self) -> None:
        data = zlib.compress(self.table.model_dump_json().encode())
        self._channel.send(self.controller, Hello("trainer", self.rank, self.engine.address.to_bytes(), data))

    def close(self) -> None:
        """Leave."""
        self._inbox.put(None)
        self._thread.join(10.0)
        self._channel.close()
        if self._sender is not None:
            self._sender.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wait_ready(self, timeout: float) -> None:
        """Wait until the plan is there. Raises DeadlineExceeded."""
        if not self._ready.wait(timeout):
            text = (
                f"trainer {self.rank}: no plan from the controller within {timeout:g} s: {self.problem or 'is it up?'}"
            )
            raise DeadlineExceeded(text, op="plan", code="ETIME")

    def push(
        self, version: int, *, timeout: float = 60.0, progress: Callable[[int, int], None] | None = None
    ) -> Outcome:
        """Take part in an update; returns within `timeout` seconds and a moment, whatever happens.

        The weights must not change meanwhile. `progress(done, all)` counts this rank's bytes.
        """
        begin = time.monotonic()
        deadline = begin + timeout
        stats = SentStats()

        def over(committed: bool, reason: str, culprits: Sequence[str]) -> Outcome:
            return Outcome(version, committed, reason, tuple(culprits), time.monotonic() - begin, stats)

        if not self._ready.wait(timeout):
            return over(False, self.problem or "there is no plan yet: not everybody has said hello", ["controller"])
        with self._state:
            if self._pushing:
                raise RuntimeError(f"trainer {self.rank}: push() is called by two threads")
            self._pushing = True
        try:
            for word in self._drain():
                if isinstance(word, Assign):
                    self._assign(word)
            self._offer(version, deadline)
            while True:
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
                elif isinstance(word, Assign):
                    self._assign(word)
                    self._offer(version, deadline)
        finally:
            with self._state:
                self._pushing = False
                for word in [word for word in self._drain() if isinstance(word, Assign)]:
                    self._assign(word)

    def _drain(self) -> list[Go | Result | Lost | Assign]:
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
            stats = self._sender.run(_links(go), deadline, check=self._check, digests=go.digests, progress=progress)
        except _Broken:
            pass  # whoever broke it has told the controller
        except (FabricError, TimeoutError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
            culprit = str(getattr(error, "peer", None) or "")
        except Exception as error:
            log.exception("trainer %d: update %d", self.rank, go.version)
            problem = f"{type(error).__name__}: {error}"
        with self._state:
            self._writing = None
            broken = go.attempt in self._broken
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
        if isinstance(event, Go | Result):
            self._going.put(event)
        elif isinstance(event, Abort):
            with self._state:
                self._broken[event.attempt] = event.reason
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
        self._channel.send(self.controller, Here("trainer", self.rank, message.plan, problem[:4000]))


def _links(go: Go) -> Links:
    return Links(
        {rank: {n: MrDesc.from_bytes(b) for n, b in descs.items()} for rank, descs in go.tensors.items()},
        dict(go.imms),
        {rank: (MrDesc.from_bytes(blob), imm) for rank, (blob, imm) in go.trainers.items()},
        {rank: NetAddr.from_bytes(blob) for rank, blob in go.addrs.items()},
    )
