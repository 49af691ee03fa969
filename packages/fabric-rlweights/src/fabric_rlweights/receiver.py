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

from fabric_core import FabricError, NetAddr, TransferEngine
from fabric_rlweights.channel import Lost
from fabric_rlweights.hooks import Hooks
from fabric_rlweights.meta import EngineTable
from fabric_rlweights.protocol import (
    Abort,
    Assign,
    Begin,
    Call,
    Commit,
    Hello,
    Here,
    Leave,
    Quiet,
    Ready,
    Received,
    Result,
    Resume,
    Seed,
    Stop,
)
from fabric_rlweights.serving import Arrived, Serving

__all__ = ["Receiver"]

log = logging.getLogger("fabric.rlweights")
_SLACK = 0.5  #: seconds that a decision may take beyond the deadline of an update, until it is given up


class Receiver(Serving):
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
            memory: the tensors of the table by name: torch tensors on the CPU or on a GPU that the engine serves, or
                numpy arrays. Scales and padding too.
            version: of the weights that are in memory now; -1: none worth serving. A late one gets the current ones.

        Raises KeyError naming a tensor of the table for which no memory is given, BadRange naming one whose memory is
        not as the table says, Unsupported: memory of a GPU that the engine does not serve, ProtocolError for a
        controller's address that is none.
        """
        super().__init__(
            engine, table, memory, controller=controller, hooks=hooks, double_buffer=double_buffer, version=version
        )
        self._thread = threading.Thread(target=self._run, name=f"fabric-rl-receiver{self.rank}", daemon=True)
        self._thread.start()
        self._say_hello()

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
        self._weights.enter()
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
                lambda expectation: self._inbox.put(Arrived(attempt, expectation)),
                timeout=message.seconds,
                peers=peers,
            )
        except Exception as error:
            log.exception("rank %d cannot begin update %d", self.rank, message.version)
            self._tell(Ready(message.attempt, self.rank, 0, {}, f"{type(error).__name__}: {error}"[:4000]))
            return
        self._tell(Ready(message.attempt, self.rank, imm, self._weights.descs()))

    def _arrived(self, event: Arrived) -> None:
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
        try:
            sums = self._weights.digests(self._weights.next) if self._digests else {}
        except Exception as error:  # a GPU without memory for it, say
            log.exception("rank %d cannot compute digests", self.rank)
            text = f"no digests: {type(error).__name__}: {error}"
            self._tell(Received(self._attempt, self.rank, text[:4000], "", {}))
            return
        self._decide_by = self._deadline + _SLACK
        self._tell(Received(self._attempt, self.rank, "", "", sums))

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

    def _call(self, _message: Call) -> None:
        self._say_hello()

    def _abort(self, message: Abort) -> None:
        self._aborted = message.attempt
        self._stop_donation()
        if message.attempt == self._attempt:
            self._drop_imm()
            self._decide_by = None
        self._tell(Quiet("receiver", message.attempt, self.rank, -1 if self._dirty else self.version))

    def _result(self, message: Result) -> None:
        self.hooks.told(message.version, message.committed, message.reason)

    _handlers: dict[type, Callable[[Any, Any], None]] = {}  # noqa: RUF012  # filled below


Receiver._handlers = {
    Assign: Receiver._assign,
    Begin: Receiver._begin,
    Arrived: Receiver._arrived,
    Commit: Receiver._commit,
    Resume: Receiver._resumed,
    Call: Receiver._call,
    Stop: Receiver._stop,
    Abort: Receiver._abort,
    Result: Receiver._result,
    Seed: Receiver._seed,
    Lost: Receiver._lost,
}
