"""Layers on a device that computes behind the host's back: a thread waits for each layer's event, then has it sent."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["LayerEvents"]


class LayerEvents:
    """Layers are passed on in the order in which they were announced. `record()` makes an event of the device's stream
    as it is now, whose `synchronize()` waits for it."""

    def __init__(self, record: Callable[[], Any] | None = None) -> None:
        self._record = record or _cuda_event
        self._queue: queue.SimpleQueue[tuple[Any, Callable[[int | None], None], int | None] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Condition()  # guards the one below
        self._left = 0
        self._thread = threading.Thread(target=self._run, name="fabric-kv-layers", daemon=True)
        self._thread.start()

    def after(self, call: Callable[[int | None], None], layer: int | None) -> None:
        """Have `call(layer)` called once what the device has queued by now is done. It must not raise."""
        event = self._record()
        with self._lock:
            self._left += 1
        self._queue.put((event, call, layer))

    def drain(self) -> None:
        """Wait until nothing that was announced is left."""
        with self._lock:
            self._lock.wait_for(lambda: not self._left)

    def close(self) -> None:
        """Pass on what is left, and end the thread. Idempotent."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, call, layer = item
            try:
                event.synchronize()
                call(layer)
            finally:
                with self._lock:
                    self._left -= 1
                    self._lock.notify_all()


def _cuda_event() -> Any:
    import torch

    event = torch.cuda.Event()
    event.record()
    return event
