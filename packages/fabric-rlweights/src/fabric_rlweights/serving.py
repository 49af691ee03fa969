"""What an inference rank serves: which version, when it may be sampled from, and how old becomes new."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from fabric_core import Expectation, NetAddr, ProtocolError, TransferEngine
from fabric_rlweights.channel import Channel, Event, address
from fabric_rlweights.donation import Donation
from fabric_rlweights.hooks import Hooks
from fabric_rlweights.meta import EngineTable
from fabric_rlweights.protocol import Commit, Committed, Resume, Resumed, Seed, Sent
from fabric_rlweights.weights import Weights

__all__ = ["Arrived", "Serving"]

log = logging.getLogger("fabric.rlweights")

_LOOK = 1.0  # seconds: more than any look takes


class Arrived:
    """The expectation of an update has ended."""

    def __init__(self, attempt: int, expectation: Expectation) -> None:
        self.attempt, self.expectation = attempt, expectation


class Serving:
    """The weights of one inference rank, and their version. Hooks are called on the receiver's thread."""

    def __init__(
        self,
        engine: TransferEngine,
        table: EngineTable,
        memory: Mapping[str, Any],
        *,
        controller: NetAddr | str,
        hooks: Hooks | None,
        double_buffer: bool,
        version: int,
    ) -> None:
        self.engine, self.table, self.hooks = engine, table, hooks or Hooks()
        self.rank, self.controller = table.rank, address(controller)
        self.version = version
        self._dirty = version < 0
        self._weights = Weights(engine, table, memory, double=double_buffer)
        self._inbox: queue.Queue[Event | Arrived | None] = queue.Queue()
        self._channel = Channel(engine, self._inbox)  # type: ignore[arg-type]
        self._plan = -1
        self._attempt = -1
        self._aborted = -1  # the last one that was: messages may overtake each other
        self._swapped = -1  # the attempt whose weights wait for `Resume`
        self._resume = -2  # the attempt whose `Resume` came first
        self._replaced = False
        self._paused = False  # the hook `pause` was called, and `resume` was not since
        self._due = 0  # writes that an update consists of
        self._next = -1  # the version that is exchanged, and not served yet
        self._donation: Donation | None = None
        self._imm: int | None = None
        self._decide_by: float | None = None
        self._changed = threading.Condition()

    # ---- what the engine asks

    @property
    def serving(self) -> bool:
        """Whether what is in memory is one version, whole."""
        return not self._dirty

    @property
    def tensors(self) -> dict[str, Any]:
        """The bytes to be served now, by name; with a double buffer other ones after each update.

        Numpy arrays of uint8; where the memory is a GPU's, torch tensors of uint8 there.

        They may be held after the receiver and its engine were closed; nobody writes to them then.
        """
        return self._weights.bytes_now

    def wait_version(self, version: int, timeout: float) -> bool:
        """Wait until that version, or a later one, is served. Returns False when the time is up."""
        with self._changed:
            return self._changed.wait_for(lambda: self.version >= version and not self._dirty, timeout)

    def _tell(self, message: Any) -> None:
        self._channel.send(self.controller, message)

    def _commit(self, message: Commit) -> None:
        if message.attempt != self._attempt or self._decide_by is None:
            return
        self._decide_by = None
        problem = ""
        try:
            if self._weights.double:
                self._pause(message.version)
                self._dirty = True
            self._look()
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
            self._weights.settle()
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

    def _stop_donation(self) -> None:
        donation, self._donation = self._donation, None
        if donation is not None:
            donation.stop()

    def _too_many(self, surplus: int) -> str:
        return f"{surplus} writes more than the {self._due} of the plan arrived: one was doubled"

    def _look(self) -> None:
        """Have the engine count all that its NICs hold: the word to commit may overtake a trainer's last write."""

        def looks() -> list[int]:
            return [group["steps"] + group["helps"] for group in self.engine.stats()["groups"]]

        enough = [begun + 2 for begun in looks()]  # one may be under way already, and the one after it must have ended
        until = time.monotonic() + _LOOK
        while not self.engine.closed and time.monotonic() < until:
            if not self.engine.progress() and all(now >= least for now, least in zip(looks(), enough, strict=True)):
                return

    def _drop_imm(self) -> int:
        imm, self._imm = self._imm, None
        return self.engine.free_imm(imm) if imm is not None and not self.engine.closed else 0
