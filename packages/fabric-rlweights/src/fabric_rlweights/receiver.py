"""The inference side. It is passive: others write into its memory, it counts, and serves what is complete.

    receiver = Receiver(engine, table, {"model.norm.weight": tensor, ...}, controller="local:rl", hooks=MyHooks())
    receiver.serving          # False while half-written weights may lie in memory
    receiver.tensors          # what is to be served: name -> bytes

In place (the default) the engine pauses for the transfer; with `double_buffer=True` writes go to a second copy, and
only the exchange of the two is seen. Either way a version is served when every write of every trainer is counted, and
not before; after a failure in place nothing is served until an update succeeds.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import Expectation, FabricError, NetAddr, ProtocolError, TransferEngine
from fabric_rlweights.channel import Channel, Event, Lost, address
from fabric_rlweights.donation import Donation
from fabric_rlweights.hooks import Hooks
from fabric_rlweights.meta import EngineTable
from fabric_rlweights.protocol import (
    Abort,
    Assign,
    Begin,
    Call,
    Commit,
    Committed,
    Hello,
    Here,
    Leave,
    Quiet,
    Ready,
    Received,
    Result,
    Resume,
    Resumed,
    Seed,
    Sent,
    Stop,
)
from fabric_rlweights.weights import Weights

__all__ = ["Receiver"]

log = logging.getLogger("fabric.rlweights")
_SLACK = 0.5  #: seconds that a decision may take beyond the deadline of an update, until it is given up


class Receiver:
    """One inference rank. A context manager; works on a thread of its own."""

    def __init__(
        self,
        engine: TransferEngine,
        table: EngineTable,
        memory: Mapping[str, Any],
        *,
        controller: NetAddr | str,
        hooks: Hooks | None = None,
        double_buffer: bool = False,
        version: int = -1,
    ) -> None:
        """Say hello to the controller.

        Args:
            memory: the tensors of the table by name: torch CPU tensors, or numpy arrays. Scales and padding too.
            version: of the weights that are in memory now; -1: none worth serving. A late one gets the current ones.

        Raises KeyError naming a tensor of the table for which no memory is given, BadRange naming one whose memory is
        not as the table says, ProtocolError for a controller's address that is none.
        """
        self.engine, self.table, self.hooks = engine, table, hooks or Hooks()
        self.rank, self.controller = table.rank, address(controller)
        self.version = version
        self._dirty = version < 0
        self._weights = Weights(engine, table, memory, double=double_buffer)
        self._inbox: queue.Queue[Event | _Arrived | None] = queue.Queue()
        self._channel = Channel(engine, self._inbox)  # type: ignore[arg-type]
        self._plan = -1
        self._attempt = -1
        self._aborted = -1  # the last one that was: messages may overtake each other
        self._swapped = -1  # the attempt whose weights wait for `Resume`
        self._resume = -2  # the attempt whose `Resume` came first
        self._replaced = False
        self._paused = False  # the hook `pause` was called, and `resume` was not since
        self._donation: Donation | None = None
        self._imm: int | None = None
        self._decide_by: float | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"fabric-rl-receiver{self.rank}", daemon=True)
        self._thread.start()
        self._say_hello()

    # ---- what the engine asks

    @property
    def serving(self) -> bool:
        """Whether what is in memory is one version, whole."""
        return not self._dirty

    @property
    def tensors(self) -> dict[str, NDArray[np.uint8]]:
        """The bytes to be served now, by name; with a double buffer other ones after each update.

        They may be held after the receiver and its engine were closed; nobody writes to them then.
        """
        return self._weights.bytes_now

    def wait_version(self, version: int, timeout: float) -> bool:
        """Wait until that version, or a later one, is served. Returns False when the time is up."""
        with self._changed:
            return self._changed.wait_for(lambda: self.version >= version and not self._dirty, timeout)

    def _say_hello(self) -> None:
        if self._replaced:
            return
        data = zlib.compress(self.table.model_dump_json().encode())
        version = -1 if self._dirty else self.version
        self._channel.send(self.controller, Hello("receiver", self.rank, self.engine.address.to_bytes(), data, version))

    def _lost(self, event: Lost) -> None:
        """The controller was slow, or we were: say hello once more. If that does not arrive either, it is gone."""
        controller = str(self.controller).partition("#")[0]
        if event.addr.partition("#")[0] == controller and not event.reason.startswith("Hello"):
            self._say_hello()

    def close(self) -> None:
        """Leave, and tell the controller so: the next update does without this rank."""
        self._inbox.put(None)
        self._thread.join(10.0)
        self._stop_donation()
        if not self.engine.closed:
            leave = Leave("receiver", self.rank, self.engine.address.to_bytes())
            self._channel.send(self.controller, leave, timeout=1.0)
            self._channel.flush(1.0)
        self._channel.close()
        self._drop_imm()
        self._weights.close()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- the thread

    def _run(self) -> None:
        while True:
            left = None if self._decide_by is None else max(0.0, self._decide_by - time.monotonic())
            try:
                event = self._inbox.get(timeout=left)
            except queue.Empty:
                self._in_doubt()
                continue
            if event is None:
                return
            handler = self._handlers.get(type(event))
            if handler is None:
                continue
            try:
                handler(self, event)
            except Exception:
                log.exception("rank %d: %s", self.rank, type(event).__name__)

    def _tell(self, message: Any) -> None:
        self._channel.send(self.controller, message)

    def _assign(self, message: Assign) -> None:
        problem = ""
        try:
            self._drop_imm()
            self._plan, self._expected = message.plan, message.expected
            self._peers = [NetAddr.from_bytes(blob) for blob in message.peers]
            self._weights.take_up(message)
        except Exception as error:
            log.exception("rank %d cannot take up the plan", self.rank)
            problem = f"{type(error).__name__}: {error}"
        self._tell(Here("receiver", self.rank, message.plan, problem[:4000]))

    def _begin(self, message: Begin) -> None:
        if message.attempt == self._aborted or self._replaced:
            return
        self._drop_imm()
        self._stop_donation()
        self._swapped, self._decide_by = -1, None
        self._attempt, self._deadline = message.attempt, time.monotonic() + message.seconds
        self._digests = message.digests
        self._due = self._expected if message.expected < 0 else message.expected
        peers = [NetAddr.from_bytes(message.peer)] if message.peer else self._peers
        try:
            if not self._weights.double:
                self._pause(message.version)
                self._dirty = True
            self._weights.filled = False
            if message.fence:
                self._weights.register()
            self._imm = imm = self.engine.alloc_imm()
            attempt = message.attempt
            self.engine.expect_imm_count(
                imm,
                self._due,
                lambda expectation: self._inbox.put(_Arrived(attempt, expectation)),
                timeout=message.seconds,
                peers=peers,
            )
        except Exception as error:
            log.exception("rank %d cannot begin update %d", self.rank, message.version)
            self._tell(Ready(message.attempt, self.rank, 0, {}, f"{type(error).__name__}: {error}"[:4000]))
            return
        self._tell(Ready(message.attempt, self.rank, imm, self._weights.descs()))

    def _arrived(self, event: _Arrived) -> None:
        if event.attempt != self._attempt or self._imm is None:
            return
        try:
            event.expectation.wait(0)  # not `exception()`: it polls, and the worker leaves what comes next to who polls
        except FabricError as error:
            culprit = str(getattr(error, "peer", None) or "")
            have = self.engine.imm_count(self._imm)
            self._tell(
                Received(self._attempt, self.rank, f"{have} of {self._due} writes arrived: {error}"[:4000], culprit, {})
            )
            return
        surplus = self.engine.imm_count(self._imm)
        if surplus:
            self._tell(Received(self._attempt, self.rank, self._too_many(surplus), "", {}))
            return
        sums = self._weights.digests(self._weights.next) if self._digests else {}
        self._decide_by = self._deadline + _SLACK
        self._tell(Received(self._attempt, self.rank, "", "", sums))

    def _too_many(self, surplus: int) -> str:
        return f"{surplus} writes more than the {self._due} of the plan arrived: one was doubled"

    def _commit(self, message: Commit) -> None:
        if message.attempt != self._attempt or self._decide_by is None:
            return
        self._decide_by = None
        problem = ""
        try:
            if self._weights.double:
                self._pause(message.version)
                self._dirty = True
            surplus = self._drop_imm()
            if surplus:  # every trainer's writes have ended by now, so this is the last word
                raise ProtocolError(self._too_many(surplus))
            if self._weights.double:
                self._weights.exchange()
            self._weights.finish(self.hooks)
            if self._weights.double:
                self._weights.register()
                self.hooks.exchange(self.tensors)
            self.hooks.reset_caches(message.version)
            self._swapped, self._next = message.attempt, message.version
        except Exception as error:
            log.exception("rank %d cannot serve version %d", self.rank, message.version)
            self._dirty = True
            problem = f"{type(error).__name__}: {error}"[:4000]
        self._tell(Committed(message.attempt, self.rank, problem))
        if self._resume == self._swapped:
            self._serve()

    def _resumed(self, message: Resume) -> None:
        """Nobody serves the old version any more: the engine may go on, with the new one."""
        self._resume = message.attempt
        if self._resume == self._swapped:
            self._serve()

    def _serve(self) -> None:
        attempt, self._swapped, problem = self._swapped, -1, ""
        try:
            with self._changed:
                self.version, self._dirty, self._paused = self._next, False, False
            self.hooks.resume(self.version)
        except Exception as error:
            log.exception("rank %d cannot serve version %d", self.rank, self.version)
            self._dirty = True
            problem = f"{type(error).__name__}: {error}"[:4000]
        with self._changed:
            self._changed.notify_all()
        self._tell(Resumed(attempt, self.rank, problem))

    def _stop(self, message: Stop) -> None:
        """Somebody else is this rank now, or everybody else serves another version than we do."""
        if message.replaced:
            self._replaced = True
        elif message.attempt < self._attempt or self.version == message.version:
            return  # it was sent before we took part in a later update, or had ended the last one
        log.error("rank %d serves nothing any more: %s", self.rank, message.reason)
        self._stop_donation()
        self._drop_imm()
        self._pause_for_good()

    def _stop_donation(self) -> None:
        donation, self._donation = self._donation, None
        if donation is not None:
            donation.stop()

    def _call(self, _message: Call) -> None:
        self._say_hello()

    def _abort(self, message: Abort) -> None:
        self._aborted = message.attempt
        self._stop_donation()
        if message.attempt == self._attempt:
            self._drop_imm()
            self._decide_by = None
        self._tell(Quiet("receiver", message.attempt, self.rank))

    def _in_doubt(self) -> None:
        """We have everything and said so, and nobody told us whether the others do: serve neither."""
        self._decide_by = None
        log.error(
            "rank %d: no word from the controller after the deadline; nothing is served until an update", self.rank
        )
        self._pause_for_good()

    def _pause_for_good(self) -> None:
        """Until an update, that is."""
        self._decide_by = None
        self._dirty = True
        try:
            self._pause(self.version)
        except Exception:
            log.exception("rank %d: the hook `pause` failed", self.rank)

    def _pause(self, version: int) -> None:
        """Have the engine pause, unless it does already: after a failed update, say."""
        if not self._paused:
            self.hooks.pause(version)
            self._paused = True

    def _result(self, message: Result) -> None:
        self.hooks.told(message.version, message.committed, message.reason)

    def _seed(self, message: Seed) -> None:
        """Give what we serve to a peer that is late. Nobody is stopped for it: our weights are only read."""
        if message.attempt == self._aborted:
            return
        self._stop_donation()
        problem = ""
        if self._dirty or self.version != message.version:
            problem = f"rank {self.rank} does not serve version {message.version} any more"
        elif not self._weights.donates:
            problem = f"rank {self.rank} has no whole copies of its tensors of class staging or fall-back to give away"
        if problem:
            self._tell(Sent(message.attempt, self.rank, problem, "", {}, 0))
            return
        now = self._weights.now
        self._donation = Donation(self.engine, self.rank, now, message, lambda: self._weights.digests(now), self._tell)

    def _drop_imm(self) -> int:
        imm, self._imm = self._imm, None
        return self.engine.free_imm(imm) if imm is not None and not self.engine.closed else 0

    _handlers: dict[type, Callable[[Any, Any], None]] = {}  # noqa: RUF012  # filled below


class _Arrived:
    """The expectation of an update has ended."""

    def __init__(self, attempt: int, expectation: Expectation) -> None:
        self.attempt, self.expectation = attempt, expectation


Receiver._handlers = {
    Assign: Receiver._assign,
    Begin: Receiver._begin,
    _Arrived: Receiver._arrived,
    Commit: Receiver._commit,
    Resume: Receiver._resumed,
    Call: Receiver._call,
    Stop: Receiver._stop,
    Abort: Receiver._abort,
    Result: Receiver._result,
    Seed: Receiver._seed,
    Lost: Receiver._lost,
}
