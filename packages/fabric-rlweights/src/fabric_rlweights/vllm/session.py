"""One worker's part in updates: weights arrive beside the model, and the model gets them when all ranks have them.

Weights are delivered in the checkpoint's form, whole, to memory of the receiver's. When an update is committed, the
worker's own thread, which waits in `apply`, loads them into the model as vLLM loads a checkpoint. So an update that
fails half-way leaves the model as it was, and what vLLM makes of weights (fused, packed, quantised, cut for TP) is
made by vLLM.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fabric_core import FabricError, TransferEngine
from fabric_rlweights.hooks import Hooks
from fabric_rlweights.meta import EngineTable
from fabric_rlweights.receiver import Receiver

__all__ = ["Params", "Session", "UpdateFailed"]

Params = Mapping[str, tuple[tuple[int, ...], str]]  #: the checkpoint's names -> shape and element type
Load = Callable[[Iterator[tuple[str, Any]]], object]

_SLACK = 5.0  # seconds beyond an update's own deadline until somebody has said how it has ended


class UpdateFailed(FabricError):
    """An update was not committed, or could not be loaded. The text says why."""


@dataclass(slots=True)
class _Job:
    """What the receiver's thread wants the worker's to do.

    Whoever acquires `claim` decides: the worker, which loads it and says `done`, or the receiver's thread, which gives
    it up. Afterwards the next update may overwrite the weights, so nobody loads what was given up.
    """

    version: int
    weights: dict[str, Any]
    done: queue.SimpleQueue[BaseException | None] = field(default_factory=queue.SimpleQueue)
    claim: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class _Told:
    version: int
    committed: bool
    reason: str


class _Bridge(Hooks):
    """Called on the receiver's thread."""

    def __init__(self, params: Params, events: queue.SimpleQueue[Any], patience: float) -> None:
        self._params = params
        self._events = events
        self._patience = patience
        self._weights: dict[str, Any] = {}
        self._job: _Job | None = None  # that nobody has taken yet
        self._closed = False

    def load(self, name: str, data: Any) -> None:
        self._weights[name] = data

    def reset_caches(self, version: int) -> None:
        weights, self._weights = self._weights, {}
        self._job = job = _Job(version, weights)
        self._events.put(job)
        try:
            problem = job.done.get(timeout=0.0 if self._closed else self._patience)
        except queue.Empty:
            if job.claim.acquire(blocking=False):
                raise UpdateFailed(
                    f"version {version} has come, and no update_weights call waits for it within {self._patience:g} s"
                ) from None
            problem = job.done.get()  # it is being loaded: until that has ended, nobody may write there
        finally:
            self._job = None
        if problem is not None:
            raise UpdateFailed(f"the model did not take version {version}: {problem}") from problem

    def close(self) -> None:
        """Have nobody wait for a worker that will not come."""
        self._closed = True
        job = self._job
        if job is not None and job.claim.acquire(blocking=False):
            job.done.put(UpdateFailed("the worker is shut down"))

    def resume(self, version: int) -> None:
        self._events.put(_Told(version, True, ""))

    def told(self, version: int, committed: bool, reason: str) -> None:
        if not committed:
            self._events.put(_Told(version, False, reason))


class Session:
    """`load`: gives (name, tensor) pairs to the model. Raises what `Receiver` does. `close` it."""

    def __init__(
        self,
        engine: TransferEngine,
        rank: int,
        params: Params,
        controller: str,
        load: Load,
        *,
        patience: float = 60.0,
    ) -> None:
        self._params = params
        self._load = load
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._engine = engine
        reason = "vLLM loads it"
        table = EngineTable(rank=rank, tensors=(), entries=(), fallback=dict.fromkeys(params, reason))
        self._bridge = _Bridge(params, self._events, patience)
        self.receiver = Receiver(engine, table, {}, controller=controller, hooks=self._bridge)

    def apply(self, version: int, timeout: float) -> None:
        """Wait for an update, and load it. Raises UpdateFailed: it was not committed, or has not come in time."""
        end = time.monotonic() + timeout + _SLACK
        while True:
            try:
                event = self._events.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise UpdateFailed(f"version {version} has not come within {timeout:g} s") from None
            if isinstance(event, _Job):
                if not event.claim.acquire(blocking=False):
                    continue  # it was given up: its memory may be another version's by now
                problem = self._take(event)
                if problem is not None:
                    raise UpdateFailed(f"the model did not take version {event.version}: {problem}") from problem
            elif event.committed and event.version >= version:
                return
            elif not event.committed and event.version == version:
                raise UpdateFailed(f"version {version} was not committed: {event.reason}")

    def _take(self, job: _Job) -> BaseException | None:
        """Load it; returns what went wrong. Whatever happens, the receiver's thread hears of it."""
        problem: BaseException | None = UpdateFailed("loading was interrupted")
        try:
            self._load(self._tensors(job.weights))
            problem = None
        except Exception as error:
            problem = error
        finally:
            job.done.put(problem)
        return problem

    def _tensors(self, weights: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        import torch

        from fabric_rlweights.dtypes import torch_dtype

        for name, (shape, dtype) in self._params.items():
            data = weights[name]
            octets = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
            yield name, octets.view(torch_dtype(dtype)).reshape(shape)

    def close(self) -> None:
        """Leave, and close the engine. Idempotent."""
        self._bridge.close()
        self.receiver.close()
        self._engine.close()
