"""The books of one process: every operation ends exactly once, in time, and says who is to blame (C1, R3, R4)."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fabric_core import Cancelled, DeadlineExceeded, NicLost, PeerLost, RemoteAccessError

__all__ = ["Entry", "Ledger", "Stalls"]

_END_GRACE = 1.0  # the engine's own: a cancelled transfer's links are cut after so long


class Stalls:
    """How long this process as a whole stood still or was starved: the engine cannot be blamed for that time."""

    def __init__(self, step: float = 0.05) -> None:
        self._past = 0.0
        self._last = time.monotonic()
        self._step = step
        threading.Thread(target=self._run, name="stalls", daemon=True).start()

    @property
    def total(self) -> float:
        """Seconds, with what goes on now: after a stop other threads may look before ours has woken up."""
        past, last = self._past, self._last
        return past + self._late(last, time.monotonic())

    def _late(self, last: float, now: float) -> float:
        late = now - last - self._step
        return late if late > self._step else 0.0

    def _run(self) -> None:
        while True:
            time.sleep(self._step)
            now = time.monotonic()
            self._past += self._late(self._last, now)
            self._last = now


@dataclass(slots=True)
class Entry:
    """One operation. `peers`: the addresses that its error may name."""

    number: int
    kind: str
    peers: frozenset[str]
    timeout: float
    begin: float
    stalled: float
    then: Callable[[Any, BaseException | None], None] | None
    operation: Any = None
    calls: int = 0
    told: bool = False


@dataclass
class Ledger:
    """Open entries, and what became of the others."""

    report: Callable[..., None]  # report("break", what=..., detail=...)
    stalls: Stalls
    slack: float
    open: dict[int, Entry] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    injected: str = ""  # the errno that faults on purpose give
    closing: bool = False
    last: int = 0

    def submit(
        self,
        kind: str,
        peers: Sequence[Any],
        timeout: float,
        start: Callable[[Callable[[Any], None]], Any],
        then: Callable[[Any, BaseException | None], None] | None = None,
    ) -> Entry:
        """Enter an operation and begin it: `start(on_done)` submits it. What `start` raises is raised, and no entry."""
        with self.lock:
            self.last += 1
            entry = Entry(
                self.last, kind, frozenset(map(str, peers)), timeout, time.monotonic(), self.stalls.total, then
            )
            self.open[entry.number] = entry
        try:
            operation = start(lambda operation: self._ended(entry, operation))
        except BaseException:
            with self.lock:
                self.open.pop(entry.number, None)
            raise
        with self.lock:
            if not entry.calls:
                entry.operation = operation
        return entry

    def _ended(self, entry: Entry, operation: Any) -> None:
        with self.lock:
            entry.calls += 1
            calls = entry.calls
            self.open.pop(entry.number, None)
        if calls > 1:
            self.report("break", what="an operation ended twice", detail=f"{entry.kind} {entry.number}, call {calls}")
            return
        state, error = operation.state, operation.exception()
        with self.lock:
            self.ends[f"{entry.kind} {state}"] += 1
            if error is not None:
                self.ends[type(error).__name__] += 1
        if (state == "done") != (error is None) or state == "pending":
            self.report("break", what="state and error disagree", detail=f"{entry.kind}: {state}, {error!r}")
        if error is not None:
            self._blame(entry, error)
        with self.lock:  # no cycles: memory goes when it is let go of
            then, entry.then, entry.operation = entry.then, None, None
        if then is not None:
            then(operation, error)

    def _blame(self, entry: Entry, error: Any) -> None:
        injected = error.code == self.injected and self.injected
        if not injected and not isinstance(
            error, PeerLost | NicLost | DeadlineExceeded | RemoteAccessError | Cancelled
        ):
            self.report("break", what="an operation ended with a strange error", detail=f"{entry.kind}: {error!r}")
        elif isinstance(error, NicLost) and error.nic is not None:
            pass  # ours, or one path: that is the culprit
        elif not isinstance(error, Cancelled) and entry.peers and error.peer not in entry.peers:
            self.report("break", what="an error does not name its peer", detail=f"{entry.kind}: {error!r}")

    def overdue(self) -> None:
        """Report what should have ended by now, each once."""
        now = time.monotonic()
        with self.lock:
            late = [
                e
                for e in self.open.values()
                if not e.told
                and now - e.begin > e.timeout + _END_GRACE + self.slack + (self.stalls.total - e.stalled) * 1.5
            ]
            for entry in late:
                entry.told = True
        for entry in late:
            operation = entry.operation
            state = operation.state if operation is not None else "not submitted, or just ended"
            self.report(
                "break",
                what="an operation did not end by its deadline",
                detail=f"{entry.kind} {entry.number} to {sorted(entry.peers)}: timeout {entry.timeout:g} s, "
                f"begun {now - entry.begin:.2f} s ago, stalled {self.stalls.total - entry.stalled:.2f} s, {state}",
            )

    def all_ended(self) -> bool:
        """Whether nothing is open."""
        with self.lock:
            return not self.open
