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

from fabric_core import Expectation, MrDesc, MrHandle, NetAddr, TransferEngine, TransferError
from fabric_rlweights.channel import Channel, Event, Lost
from fabric_rlweights.digest import box_digest
from fabric_rlweights.dtypes import itemsize_of
from fabric_rlweights.hooks import Hooks
from fabric_rlweights.memory import Span, span_of
from fabric_rlweights.meta import EngineTable
from fabric_rlweights.protocol import (
    Abort,
    Assign,
    Begin,
    Commit,
    Committed,
    Hello,
    Here,
    Quiet,
    Ready,
    Received,
    Result,
    Seed,
    Sent,
)
from fabric_rlweights.route import unpack

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

        Raises KeyError naming a tensor of the table for which no memory is given.
        """
        self.engine, self.table, self.hooks = engine, table, hooks or Hooks()
        self.rank, self.controller = table.rank, controller
        self.version = version
        self._dirty = version < 0
        self._double = double_buffer
        direct = {t.name: t for t in table.tensors if t.layout == "direct"}
        missing = sorted(direct.keys() - memory.keys())
        if missing:
            raise KeyError(
                f"no memory is given for {', '.join(missing[:5])} ({len(missing)} tensors of rank {self.rank})"
            )
        self._real = {name: span_of(memory[name]) for name in direct}
        self._tables = {t.name: t for t in table.tensors}
        self._inbox: queue.Queue[Event | _Arrived | None] = queue.Queue()
        self._channel = Channel(engine, self._inbox)  # type: ignore[arg-type]
        self._plan = -1
        self._names: list[str] = []
        self._now: list[Span] = []  # what is served, by number
        self._next: list[Span] = []  # what is written to
        self._handles: list[MrHandle] = []
        self._descs: list[MrDesc] = []
        self._attempt = -1
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
        """The bytes to be served now, by name; with a double buffer other ones after each update."""
        return {name: span.bytes() for name, span in zip(self._names, self._now, strict=True)}

    def wait_version(self, version: int, timeout: float) -> bool:
        """Wait until that version, or a later one, is served. Returns False when the time is up."""
        with self._changed:
            return self._changed.wait_for(lambda: self.version >= version and not self._dirty, timeout)

    def _say_hello(self) -> None:
        data = zlib.compress(self.table.model_dump_json().encode())
        version = -1 if self._dirty else self.version
        self._channel.send(self.controller, Hello("receiver", self.rank, self.engine.address.to_bytes(), data, version))

    def _lost(self, event: Lost) -> None:
        """The controller was slow, or we were: say hello once more. If that does not arrive either, it is gone."""
        controller = str(self.controller).partition("#")[0]
        if event.addr.partition("#")[0] == controller and not event.reason.startswith("Hello"):
            self._say_hello()

    def close(self) -> None:
        """Leave."""
        self._inbox.put(None)
        self._thread.join(10.0)
        self._channel.close()
        self._drop_imm()
        for handle in self._handles:
            handle.close()

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
            self._take_up(message)
        except Exception as error:
            log.exception("rank %d cannot take up the plan", self.rank)
            problem = f"{type(error).__name__}: {error}"
        self._tell(Here("receiver", self.rank, message.plan, problem[:4000]))

    def _take_up(self, message: Assign) -> None:
        self._drop_imm()
        self._plan, self._names, self._expected = message.plan, message.names, message.expected
        self._peers = [NetAddr.from_bytes(blob) for blob in message.peers]
        self._boxes = {name: unpack(packed) for name, packed in message.columns.items()}
        self._staging = message.staging
        self._now, self._next = [], []
        for number, name in enumerate(self._names):
            if number in self._staging:
                self._now.append(self._fresh(self._staging[number][0]))
                self._next.append(self._now[-1])
                continue
            self._now.append(self._real[name])
            self._next.append(self._fresh(self._real[name].nbytes) if self._double else self._real[name])
        if self._double:  # what no parameter fills must be in both
            for old, new in zip(self._now, self._next, strict=True):
                if old is not new:
                    np.copyto(new.bytes(), old.bytes())
        self._register()

    def _fresh(self, nbytes: int) -> Span:
        memory = self.engine.empty(nbytes)
        return Span(memory.ptr, nbytes, memory)

    def _register(self) -> None:
        """Register what is written to; what was registered before cannot be reached any more."""
        for handle in self._handles:
            handle.close()
        made = [self.engine.reg_mr((span.address, span.nbytes)) for span in self._next]
        self._handles, self._descs = [handle for handle, _ in made], [desc for _, desc in made]

    def _begin(self, message: Begin) -> None:
        self._drop_imm()
        self._attempt, self._deadline = message.attempt, time.monotonic() + message.seconds
        self._digests = message.digests
        self._due = self._expected if message.expected < 0 else message.expected
        peers = [NetAddr.from_bytes(message.peer)] if message.peer else self._peers
        try:
            if not self._double:
                self.hooks.pause(message.version)
                self._dirty = True
            if message.fence:
                self._register()
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
        descs = {number: desc.to_bytes() for number, desc in enumerate(self._descs)}
        self._tell(Ready(message.attempt, self.rank, imm, descs))

    def _arrived(self, event: _Arrived) -> None:
        if event.attempt != self._attempt or self._imm is None:
            return
        error = event.expectation.exception()
        if error is not None:
            culprit = str(getattr(error, "peer", None) or "")
            have = self.engine.imm_count(self._imm)
            self._tell(
                Received(self._attempt, self.rank, f"{have} of {self._due} writes arrived: {error}"[:4000], culprit, {})
            )
            return
        surplus = self._drop_imm()
        if surplus:
            text = f"{surplus} writes more than the {self._due} of the plan arrived: one was doubled"
            self._tell(Received(self._attempt, self.rank, text, "", {}))
            return
        sums = self._sums() if self._digests else {}
        self._decide_by = self._deadline + _SLACK
        self._tell(Received(self._attempt, self.rank, "", "", sums))

    def _sums(self) -> dict[int, int]:
        """Return the digest of what lies in each tensor now, as far as an update writes it."""
        sums: dict[int, int] = {}
        b = self._boxes
        for row, number in enumerate(b["tensor"].tolist()):
            part = box_digest(
                self._next[number].bytes(), int(b["offset"][row]), tuple(b["size"][row].tolist()),
                tuple(b["stride"][row].tolist()), int(b["item"][row]),
            )  # fmt: skip
            sums[number] = (sums.get(number, 0) + part) & ((1 << 64) - 1)
        return sums

    def _commit(self, message: Commit) -> None:
        if message.attempt != self._attempt or self._decide_by is None:
            return
        self._decide_by = None
        problem = ""
        try:
            if self._double:
                self.hooks.pause(message.version)
                self._dirty = True
                self._now, self._next = self._next, self._now
            for number, (_nbytes, kind) in self._staging.items():
                self._finish(self._names[number], self._now[number], kind)
            if self._double:
                self._register()
                self.hooks.exchange(self.tensors)
            self.hooks.reset_caches(message.version)
            with self._changed:
                self.version, self._dirty = message.version, False
            self.hooks.resume(message.version)
        except Exception as error:
            log.exception("rank %d cannot serve version %d", self.rank, message.version)
            self._dirty = True
            problem = f"{type(error).__name__}: {error}"[:4000]
        with self._changed:
            self._changed.notify_all()
        self._tell(Committed(message.attempt, self.rank, problem))

    def _finish(self, name: str, span: Span, kind: str) -> None:
        data = span.bytes()
        if kind == "fallback":
            self.hooks.load(name.removeprefix("fallback:"), data)
        elif kind == "staging":
            self.hooks.finish(name, data)
        else:  # a tensor of ours with strides that nobody writes piece by piece
            tensor = self._tables[name]
            item = itemsize_of(tensor.dtype)
            bits = self._real[name].bytes()[: self._real[name].nbytes // item * item].view(f"<u{item}")
            there = np.lib.stride_tricks.as_strided(bits, tensor.shape, tensor.strides)
            np.copyto(there, data.view(f"<u{item}").reshape(tensor.shape))

    def _abort(self, message: Abort) -> None:
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
        self._dirty = True
        try:
            self.hooks.pause(self.version)
        except Exception:
            log.exception("rank %d: the hook `pause` failed", self.rank)

    def _result(self, message: Result) -> None:
        self.hooks.told(message.version, message.committed, message.reason)

    def _seed(self, message: Seed) -> None:
        """Write what we serve to a peer that is late. Nobody else is stopped: our weights are only read."""
        problem, culprit = "", ""
        handles: list[MrHandle] = []
        try:
            transfers = []
            for number, span in enumerate(self._now):
                handle, _desc = self.engine.reg_mr((span.address, span.nbytes), write=False)
                handles.append(handle)
                desc = MrDesc.from_bytes(message.descs[number])
                transfers.append(
                    self.engine.submit_single_write(
                        span.nbytes, message.imm, (handle, 0), (desc, 0), timeout=message.seconds
                    )
                )
            for transfer in transfers:
                transfer.wait(message.seconds)
        except (TransferError, KeyError, ValueError, TimeoutError) as error:
            problem, culprit = f"{type(error).__name__}: {error}", str(getattr(error, "peer", None) or "")
        finally:
            for handle in handles:
                handle.close()
        sums = {message.rank: self._sums_of_now()} if message.digests and not problem else {}
        self._tell(Sent(message.attempt, self.rank, problem[:4000], culprit, sums, sum(s.nbytes for s in self._now)))

    def _sums_of_now(self) -> dict[int, int]:
        spare, self._next = self._next, self._now
        try:
            return self._sums()
        finally:
            self._next = spare

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
    Abort: Receiver._abort,
    Result: Receiver._result,
    Seed: Receiver._seed,
    Lost: Receiver._lost,
}
