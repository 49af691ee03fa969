"""A prefill that takes time and computes nothing: layers become ready by the clock, as on a GPU that works by itself.

How time passes: each layer has an absolute time on the monotonic clock, one compute time after the layer before it. The
thread sleeps until then in `threading.Event.wait`, which ends at once when the run is given up; nothing spins. Because
the times are absolute, what a hook takes does not delay the next layer, just as submitting does not delay a GPU. A hook
that takes longer than a layer is seen as lateness of the next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["Busy", "TimedPrefill"]

_SPAN = 4 << 20  # bytes that a busy thread walks over: more than a core's own caches hold
_STRIDE = 64 << 10  # bytes at a time, a few microseconds: it must notice when a layer is due


class Busy:
    """Work of the kind that a model's thread does on a processor: arithmetic over more memory than its caches hold."""

    def __init__(self) -> None:
        self._parts = np.zeros(_SPAN // 4, np.float32).reshape(-1, _STRIDE // 4)
        self._next = 0

    def __call__(self) -> None:
        part = self._parts[self._next]
        np.add(part, 1.0, out=part)
        self._next = (self._next + 1) % len(self._parts)


class TimedPrefill:
    """`layers` layers in each chunk; a layer of chunk k takes `compute_us[k]`."""

    def __init__(self, layers: int, compute_us: Sequence[float]) -> None:
        self.layers = layers
        self.compute_us = list(compute_us)
        self.late_us: list[float] = []  #: how much later than planned each hook began: the kernel's sleep, mostly
        self.ended_ns = 0  #: when the last layer was ready, as planned
        self._stop = threading.Event()

    @property
    def total_us(self) -> float:
        return self.layers * sum(self.compute_us)

    def run(self, hook: Callable[[int, int], object], idle: Callable[[], object] | None = None) -> None:
        """Call `hook(chunk, layer number)` for each layer when it is ready. Raises what the hook raises.

        `idle`: called again and again while a layer computes, instead of sleeping: for a thread that polls something,
        or is busy.
        """
        due = time.monotonic_ns()
        for chunk, each in enumerate(self.compute_us):
            for layer in range(self.layers):
                due += int(1000 * each)
                while not self._stop.is_set() and (left := due - time.monotonic_ns()) > 0:
                    if idle is None:
                        self._stop.wait(left / 1e9)
                    else:
                        idle()
                if self._stop.is_set():
                    return
                self.late_us.append((time.monotonic_ns() - due) / 1000)
                self.ended_ns = due
                hook(chunk, layer)

    def stop(self) -> None:
        """Give up: `run` returns before its next layer. Any thread."""
        self._stop.set()
