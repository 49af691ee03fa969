"""The worker half: one rank's engine, and what it sends and receives with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from fabric_core import FabricError, TransferEngine
from fabric_kvcache.decoder import Decoder
from fabric_kvcache.patience import patient
from fabric_kvcache.prefiller import Prefiller
from fabric_kvcache.vllm.caches import Caches, LayerCache, describe
from fabric_kvcache.vllm.layer_events import LayerEvents
from fabric_kvcache.vllm.options import Options
from fabric_kvcache.vllm.receives import Receives
from fabric_kvcache.vllm.sends import Sends
from fabric_kvcache.vllm.steps import Report, Step

__all__ = ["Worker"]

log = logging.getLogger("fabric.kvcache.vllm")

# Seconds. An engine that waits for KV steps every millisecond, and on processors its workers spin in between (they call
# sched_yield): where there are two processors, that can keep a prefiller on the same machine from running for a minute.
# So a step in which nothing is computed looks for so long whether something comes, and sleeps between two looks.
_IDLE_STEP, _LOOK = 0.02, 0.001


class Worker:
    """Of one rank. `close` it."""

    def __init__(
        self,
        caches: Sequence[LayerCache],
        options: Options,
        *,
        tp: int,
        rank: int,
        packing: str,
        device: str,
        instance: str,
        most: int,
        producer: bool,
        consumer: bool,
    ) -> None:
        """Open an engine, and register the caches with it.

        Args:
            packing: see caches.py.
            device: "cpu", or "cuda:0".
            instance: a name that all ranks of this instance have, and only they.
            most: requests at a time.

        Raises ConfigError, Unsupported, BackendError.
        """
        self.packing = packing
        self.caches: Caches = describe(caches, tp=tp, rank=rank, packing=packing, pieces=options.pieces)
        self._tensors = [cache.tensor for cache in caches]  # they are to outlive the registration
        self._events = LayerEvents() if device != "cpu" else None
        self._step = Step()
        self._layers: Callable[[int | None], None] = _ignored
        self.sends: Sends | None = None
        self.receives: Receives | None = None
        shard = self.caches.shard
        where = (self.caches.address, self.caches.nbytes)
        common: dict[str, Any] = {
            "tp": rank,
            "pages": shard.pages,
            "bases": shard.bases,
            "memory": where if device == "cpu" else (*where, device),
        }
        name = None if options.name is None else f"{options.name}-{rank}"
        with ExitStack() as undo:
            settings = patient(backend=options.backend, nics=options.nics, heartbeat=options.heartbeat)
            self.engine = TransferEngine.open(device, settings=settings, name=name)
            undo.callback(self.engine.close)
            if producer:
                prefiller = Prefiller(self.engine, shard.layout, max_jobs=most, max_waiting=max(64, 4 * most), **common)
                undo.callback(prefiller.close)
                drain, settle = (
                    (_nothing, _nothing) if self._events is None else (self._events.drain, lambda: _settle(device))
                )
                self.sends = Sends(prefiller, self.caches, drain=drain, settle=settle)
                undo.callback(self.sends.close)
            if consumer:
                decoder = Decoder(
                    self.engine,
                    shard.layout,
                    max_requests=most,
                    max_sources=64,
                    confirm_timeout=options.confirm_timeout,
                    instance=instance,
                    **common,
                )
                undo.callback(decoder.close)
                self.receives = Receives(decoder, self.caches, timeout=options.timeout, packing=packing)
            self._undo = undo.pop_all()

    @property
    def address(self) -> str:
        return str(self.engine.address)

    # ---- a step

    def begin(self, step: Step) -> None:
        """Before the forward pass."""
        self._step = step
        if self.sends is not None:
            self.sends.begin(step)
            self._layers = self.sends.layers()
        if self.receives is not None:
            self.receives.begin(step)

    def layer(self, name: str) -> None:
        """A layer's KV is in the cache, or will be when what the device has queued by now is done."""
        number = self.caches.layers.get(name)
        if number is not None and self._step.advances:
            self._announce(number)

    def _announce(self, layer: int | None) -> None:
        if self._events is None:
            self._layers(layer)
        else:
            self._events.after(self._layers, layer)

    def end(self) -> None:
        """After the forward pass."""
        if self.sends is not None and self._step.advances:
            self._announce(None)
            self.sends.end(self._step)

    def poll(self) -> tuple[set[str], set[str], set[str]]:
        """Return the ids of requests (sent, whose receiving has ended, and of those that were not received)."""
        found = self._poll()
        if self._step.idle and self._events is None:
            end = time.monotonic() + _IDLE_STEP
            while self._waits() and not any(found) and time.monotonic() < end:
                time.sleep(_LOOK)
                found = self._poll()
        return found

    def _waits(self) -> bool:
        """Whether something is under way, and nothing is to be told."""
        halves = [half for half in (self.sends, self.receives) if half is not None]
        return any(half.waiting for half in halves) and not any(half.report for half in halves)

    def _poll(self) -> tuple[set[str], set[str], set[str]]:
        sent = self.sends.poll() if self.sends is not None else set()
        ended, failed = self.receives.poll() if self.receives is not None else (set(), set())
        return sent, ended, failed

    def report(self) -> Report:
        """Return what has happened since the last call."""
        taken = Report()
        for half in (self.sends, self.receives):
            if half is not None:
                found, half.report = half.report, Report()
                taken.add(found)
        return taken

    def close(self) -> None:
        """End everything, and the engine. Idempotent."""
        if self._events is not None:
            self._events.close()
        try:
            self._undo.close()
        except FabricError as error:
            log.warning("the KV transfer did not end well: %s", error)


def _ignored(_number: int | None) -> None:
    pass


def _nothing() -> None:
    pass


def _settle(device: str) -> None:
    import torch

    torch.cuda.current_stream(device).synchronize()
