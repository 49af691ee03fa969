"""Calls something later: one thread per decoder, started at the first need. What it calls may take its time."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from fabric_kvcache.arguments import LONGEST_SLEEP

__all__ = ["Clock"]

log = logging.getLogger("fabric.kvcache")


class Clock:
    """Any thread may ask; calls are made one after another, by one thread, none of them before its time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()  # guards the four below
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()  # first asked, first called; and callables are never compared
        self._thread: threading.Thread | None = None
        self._closed = False

    def call(self, seconds: float, what: Callable[[], object]) -> None:
        """Have `what()` called in so many seconds. After close(): never."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._number), what))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, timeout: float = 5.0) -> None:
        """Call nothing any more; wait for a call that is being made. Idempotent."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed:
                    left = self._due[0][0] - time.monotonic() if self._due else None
                    if left is not None and left <= 0:
                        break
                    self._changed.wait(None if left is None else min(left, LONGEST_SLEEP))
                if self._closed:
                    return
                what = heapq.heappop(self._due)[2]
            try:
                what()
            except Exception:
                log.exception("%r failed", what)
