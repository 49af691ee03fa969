"""Layers that are ready by a word: whoever computes bumps it, also a GPU; the pushes follow.

Mostly the engine's watcher thread submits them, in C (ahead.py). What cannot be prepared when the watch is made is
pushed by a callback, which takes two wake-ups and Python (`CalledWatch`). In both a thread of this process that bumps
the word by `value` has them done at once, in itself.

A word whose address was asked for may be bumped by work that is queued on a GPU after its job has ended. It is nobody
else's until its last step, or until its user says that the stream has ended: else that work would push the layers of
another job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from fabric_core import FabricError, PreparedSequence, StaleHandle, TransferEngine, UvmWatcher

__all__ = ["CalledWatch", "LayerWatch", "Part"]

Part = tuple[int, int, int]  #: layer, first token, end


class LayerWatch:
    """The word counts finished steps: the layers of the first chunk, then those of the second, ...

    Several steps may be heard as one; each is pushed once.
    """

    _word: UvmWatcher | PreparedSequence

    def __init__(self, steps: Sequence[Part]) -> None:
        self.steps = tuple(steps)
        self.error: FabricError | None = None  #: why a push was refused; the job's own end tells the decoders
        self._changed = threading.Condition()  # guards the two below
        self._pushed = 0
        self._closed = False
        self._lent = False  # the word's address was asked for

    @property
    def ptr(self) -> int:
        """Address of the u64; GPUs reach it where the engine serves one. See `release`."""
        self._lent = True
        return self._word.ptr

    @property
    def value(self) -> int:
        return self._word.value

    @value.setter
    def value(self, steps: int) -> None:
        """So many steps are finished: submit those that were not. Raises nothing: see `error`."""
        self._store(steps)

    def _store(self, steps: int) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """Push nothing from now on."""

    def wait_all(self, timeout: float) -> bool:
        """Wait until all steps were pushed, one was refused, or it was closed; False: not all within `timeout`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._pushed == len(self.steps) or self.error is not None or self._closed, timeout
            )
            return self._pushed == len(self.steps)

    @property
    def waiting(self) -> bool:
        """Whether there are steps that it is still to push."""
        with self._changed:
            return self._pushed < len(self.steps) and self.error is None and not self._closed

    def close(self) -> None:
        """Push nothing any more; the job does it at its end. A word that a GPU may still bump is kept. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._finish()
        with suppress(StaleHandle):  # the callback thread may have closed it just now
            if not self._lent or self._word.value >= len(self.steps):
                self._word.close()

    def release(self) -> None:
        """Nobody bumps the word any more (the stream has ended, or was never started): give it back.

        Needed only for a job that ended before the word's last step; without it the word is kept until then, or until
        the engine closes. Idempotent.
        """
        self.close()
        self._word.close()


class CalledWatch(LayerWatch):
    """Pushes by a callback of the engine's."""

    def __init__(self, engine: TransferEngine, steps: Sequence[Part], push: Callable[[int, int, int], object]) -> None:
        super().__init__(steps)
        self._push = push
        self._begun = 0  # steps that a thread has taken on
        self._word: UvmWatcher = engine.alloc_uvm_watcher(self._bumped)

    def _store(self, steps: int) -> None:
        self._word.value = steps
        self._bumped(0, steps)

    def _bumped(self, _old: int, new: int) -> None:
        with self._changed:
            first, end = self._begun, min(new, len(self.steps))
            last = self._closed and new >= len(self.steps)
        if last:
            self._word.close()
            return
        with self._changed:
            if self._closed or self.error is not None or first >= end:
                return
            self._begun = end
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
