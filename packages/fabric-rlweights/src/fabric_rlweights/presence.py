"""A trainer rank's place in a job: it says hello, hears the controller, and takes up the plans that it is given."""

from __future__ import annotations

import logging
import queue
import threading
import zlib
from collections.abc import Sequence
from typing import Any, Self

from fabric_core import ConfigError, DeadlineExceeded, MrDesc, NetAddr, TransferEngine
from fabric_rlweights.channel import Channel, Event, Lost, address
from fabric_rlweights.meta import TrainerTable
from fabric_rlweights.protocol import Abort, Assign, Call, Go, Hello, Here, Leave, Quiet, Result, Sent, Stop
from fabric_rlweights.route import Route
from fabric_rlweights.sender import Sender
from fabric_rlweights.views import check_served, device_name

__all__ = ["Over", "Presence"]

log = logging.getLogger("fabric.rlweights")
_REMEMBERED = 64  #: attempts that were broken off


class Over:
    """A word to the thread that pushes: there is nothing more to wait for."""


class Presence:
    """One trainer rank, as the controller knows it. A context manager; hears on a thread of its own."""

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
            buffers: the memory that the table's shards lie in, by number: contiguous tensors, on the CPU or on one GPU
                that the engine serves, or arrays. They stay where they are as long as this object lives.
            watermark: bytes of temporary memory, at most. Allocated once, when the first plan needs any: on the GPU of
                the buffers, or on the engine's if parameters lie in host memory (they are fetched piece by piece).

        Raises ProtocolError for a controller's address that is none; Unsupported: a buffer is on a GPU that the engine
        does not serve; BadRange: it is on a device of another kind.
        """
        for number, buffer in enumerate(buffers):
            check_served(engine, device_name(buffer), f"trainer {table.rank}: buffer {number}")
        self.engine, self.table, self.rank = engine, table, table.rank
        self.controller, self.watermark = address(controller), watermark
        self._buffers = list(buffers)
        self._inbox: queue.Queue[Event | None] = queue.Queue()
        self._channel = Channel(engine, self._inbox)  # type: ignore[arg-type]
        self._sender: Sender | None = None
        self._descs: dict[bytes, MrDesc] = {}
        self._going: queue.Queue[Go | Result | Lost | Assign | Over] = queue.Queue()
        self.newest = -1  #: the latest version that the controller has spoken of, to whichever rank it mattered
        self._over = ""  # why this object can push no more
        self._broken: dict[int, str] = {}  # attempt -> why
        self._state = threading.Lock()  # of the three below
        self._pushing = False  # a thread is in push(), and takes up plans itself
        self._writing: int | None = None  # the attempt that it writes for
        self._plan = -1
        self._refused: Assign | None = None  # the plan that could not be taken up
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

    def __enter__(self) -> Self:
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
        self._going.put(Over())
        self._answered.set()

    def _refuse(self, go: Go) -> None:
        """Nobody pushes that version here any more: the others need not wait until the deadline to hear so."""
        sent = Sent(go.attempt, self.rank, f"push({go.version}) has returned here already", "", {}, 0)
        self._channel.send(self.controller, sent)

    # ---- the thread

    def _run(self) -> None:
        while (event := self._inbox.get()) is not None:
            try:
                self._hear(event)
            except Exception:
                log.exception("trainer %d: %s", self.rank, type(event).__name__)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Go | Result):
            self.newest = max(self.newest, event.version)
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

    def _take_up_again(self) -> bool:
        """Try a plan once more that could not be taken up: memory that was short may be there by now."""
        with self._state:
            if self._refused is not None:
                self._assign(self._refused)
            return self._ready.is_set()

    def _assign(self, message: Assign) -> None:
        problem = ""
        try:
            route = Route.from_wire(message.columns)
            old, self._sender = self._sender, None
            if old is not None:
                old.close()
                del old  # and its temporary memory, before there is another one
            self._sender = Sender(self.engine, self._buffers, route, watermark=self.watermark)
            self._plan = message.plan
        except Exception as error:
            log.exception("trainer %d cannot take up the plan", self.rank)
            self._sender = None
            problem = f"{type(error).__name__}: {error}"
        self.problem, self._refused = problem, message if problem else None
        if problem:
            self._ready.clear()
        else:
            self._ready.set()
        self._answered.set()
        self._channel.send(self.controller, Here("trainer", self.rank, message.plan, problem[:4000]))
