"""How a decoder's request ends, for those who wait: done once, settled once, awaited, and callbacks for both."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Self

from fabric_core import FabricError
from fabric_kvcache.arguments import LONGEST_SLEEP, seconds

if TYPE_CHECKING:
    from fabric_kvcache.received import ReceivedKv

__all__ = ["Outcome"]

log = logging.getLogger("fabric.kvcache")


class Outcome:
    """`done`: it has ended, well or badly. `settled`: no write of it can land any more, and it is done. Any thread."""

    def __init__(self, name: str) -> None:
        self._name = name  # of the request
        self._error: FabricError | None = None
        self._done = threading.Event()
        self._settled = threading.Event()
        self._calls = threading.Lock()  # guards the two below; no callback is called under it
        self._done_calls: list[Callable[[Self], object]] = []
        self._settled_calls: list[Callable[[Self], object]] = []

    @property
    def settled(self) -> bool:
        """Whether no write of this request can land any more: its pages may be used again (or hold its KV)."""
        return self._settled.is_set()

    @property
    def error(self) -> FabricError | None:
        """Why it has ended badly; None: it goes on, or its KV is there. Also for callbacks: it waits for nothing."""
        return self._error if self._done.is_set() else None

    def wait_settled(self, timeout: float) -> bool:
        """Block until its pages are safe; False: they are not, within `timeout` seconds."""
        end = time.monotonic() + seconds("timeout", timeout)
        while not self._settled.wait(max(0.0, min(end - time.monotonic(), LONGEST_SLEEP))):
            if time.monotonic() >= end:
                return False
        return True

    def __await__(self) -> Generator[Any, None, ReceivedKv]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def ended(_: object) -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the loop is closed: nobody waits any more
                pass

        self.add_done_callback(ended)
        try:
            yield from future.__await__()
        except BaseException:  # who awaited it has given up, and nobody else has its pages to give back
            self.cancel()
            raise
        return self._outcome()

    def cancel(self) -> None:
        """End it."""
        raise NotImplementedError

    def _outcome(self) -> ReceivedKv:
        """Return what it has ended with, or raise it."""
        raise NotImplementedError

    def add_done_callback(self, call: Callable[[Self], object]) -> None:
        """Call `call(self)` when it ends (callback thread, or the one that saw it first); at once if it has."""
        self._add(self._done, self._done_calls, call)

    def add_settled_callback(self, call: Callable[[Self], object]) -> None:
        """Call `call(self)` when its pages are safe."""
        self._add(self._settled, self._settled_calls, call)

    def _add(self, event: threading.Event, calls: list[Any], call: Callable[[Self], object]) -> None:
        with self._calls:
            if not event.is_set():
                calls.append(call)
                return
        call(self)

    def _tell_done(self) -> None:
        """It has ended. The first call counts."""
        calls = self._set(self._done, self._done_calls)
        if calls is not None:
            self._call(calls)

    def _tell_settled(self) -> None:
        """Nothing of it can land any more, so it is done too. The first call counts."""
        with self._calls:  # both at once: nobody finds it settled and not done
            calls = [] if self._done.is_set() else self._done_calls.copy()
            if not self._settled.is_set():
                calls += self._settled_calls
                self._settled_calls.clear()
            self._settled.set()
            self._done.set()
            self._done_calls.clear()
        self._call(calls)

    def _set(self, event: threading.Event, calls: list[Any]) -> list[Any] | None:
        """Return who is to be called; None: it was set before."""
        with self._calls:
            if event.is_set():
                return None
            event.set()
            taken = calls.copy()
            calls.clear()
        return taken

    def _call(self, calls: list[Any]) -> None:
        for call in calls:
            try:
                call(self)
            except Exception:
                log.exception("a callback of request %s failed", self._name)
