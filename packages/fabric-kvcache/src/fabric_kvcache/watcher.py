"""Layers that are ready by a word: whoever computes bumps it, also a GPU; the pushes follow on the callback thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from fabric_core import FabricError, TransferEngine

__all__ = ["LayerWatch"]

log = logging.getLogger("fabric.kvcache")

Step = tuple[int, int, int]  #: layer, first token, end


class LayerWatch:
    """The word counts finished steps: the layers of the first chunk, then those of the second, ...

    Several steps may be heard as one; each is pushed once.
    """

    def __init__(self, engine: TransferEngine, steps: Sequence[Step], push: Callable[[int, int, int], object]) -> None:
        self.steps = tuple(steps)
        self.error: FabricError | None = None  #: why a push was refused; the job's own end tells the decoders
        self._push = push
        self._changed = threading.Condition()  # guards the two below
        self._pushed = 0
        self._closed = False
        self._word = engine.alloc_uvm_watcher(self._bumped)

    @property
    def ptr(self) -> int:
        """Address of the u64; GPUs reach it where the engine serves one."""
        return self._word.ptr

    @property
    def value(self) -> int:
        return self._word.value

    @value.setter
    def value(self, steps: int) -> None:
        self._word.value = steps

    def _bumped(self, _old: int, new: int) -> None:
        with self._changed:
            first, end = self._pushed, min(new, len(self.steps))
            if self._closed or self.error is not None:
                return
        for step in self.steps[first:end]:
            try:
                self._push(*step)
            except FabricError as error:
                with self._changed:
                    self.error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._pushed += 1
                self._changed.notify_all()

    def wait_all(self, timeout: float) -> bool:
        """Wait until all steps were pushed, or one was refused; False: not within `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._pushed == len(self.steps) or self.error is not None, timeout)
            return self._pushed == len(self.steps)

    def close(self) -> None:
        """Push nothing any more. Idempotent."""
        with self._changed:
            self._closed = True
        self._word.close()
