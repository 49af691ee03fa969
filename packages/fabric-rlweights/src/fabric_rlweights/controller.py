"""The controller: gathers both sides' tables, makes the plan once, and decides each update, all or nothing.

    with TransferEngine.open(name="rl") as engine, Controller(engine, trainers=4, receivers=2) as controller:
        controller.wait_ready(60)
        report = controller.wait_report(version, 60)

An update begins with the first trainer's offer and ends by that offer's deadline: every receiver has counted every
write, every trainer has seen its writes end well, digests agree (if asked for): commit; or somebody did not: not
committed, with the names of those.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from fabric_core import ConfigError, DeadlineExceeded, TransferEngine
from fabric_rlweights.channel import Channel, Event, Lost
from fabric_rlweights.late import seed_late_receivers
from fabric_rlweights.members import Members
from fabric_rlweights.plan import Options, Plan
from fabric_rlweights.protocol import Hello, Here, Leave, Offer, Result, Resumed
from fabric_rlweights.report import UpdateReport
from fabric_rlweights.updates import Updates

__all__ = ["Controller"]

log = logging.getLogger("fabric.rlweights")


class Controller:
    """Works on a thread of its own; a context manager."""

    def __init__(
        self,
        engine: TransferEngine,
        *,
        trainers: int,
        receivers: int,
        options: Options | None = None,
        digests: bool = False,
        on_report: Callable[[UpdateReport], None] | None = None,
    ) -> None:
        """Wait for so many trainers and receivers, then plan.

        Args:
            digests: compare, for every tensor, what was sent with what is held, before each commit. One read of the
                weights on either side.
            on_report: called with the report of each update, on this thread.
        """
        for name, count in (("trainers", trainers), ("receivers", receivers)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigError(f"{name}={count!r}: how many to wait for, a whole number from 1 on")
        self.engine = engine
        self.reports: dict[int, UpdateReport] = {}  #: by version; a version that was tried again keeps its last
        self._on_report = on_report
        self._changed = threading.Condition()
        self._inbox: queue.Queue[Event | None] = queue.Queue()
        self._channel = Channel(engine, self._inbox)  # type: ignore[arg-type]
        wanted = {"trainer": trainers, "receiver": receivers}
        self._members = Members(wanted, options or Options(), self._channel, self._notify)
        self._updates = Updates(self._members, self._channel, self._inbox, digests=digests)
        self._thread = threading.Thread(target=self._run, name="fabric-rl-controller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. An update under way is not committed, unless it is already, and those who push are told so."""
        self._inbox.put(None)
        self._thread.join(10.0)
        self._channel.flush(2.0)
        self._channel.close()

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def plan(self) -> Plan | None:
        """The plan, once everybody who was waited for has said hello, and as long as there can be one."""
        return self._members.plan

    @property
    def problem(self) -> str:
        """Why there is no plan, or who cannot take it up; empty: nothing is known to be wrong."""
        return self._members.problem

    @property
    def ready(self) -> bool:
        """Whether everybody has taken up the plan."""
        return self._members.ready

    def wait_ready(self, timeout: float) -> None:
        """Wait for `ready`. Raises ConfigError: there can be no plan; DeadlineExceeded: somebody is missing."""
        with self._changed:
            if self._changed.wait_for(lambda: self.ready or bool(self.problem), timeout) and self.ready:
                return
        if self.problem:
            raise ConfigError(self.problem)
        raise DeadlineExceeded(f"not ready within {timeout:g} s: {self._members.missing()}", op="plan", code="ETIME")

    def wait_report(self, version: int, timeout: float) -> UpdateReport:
        """Wait for the end of an update. Raises DeadlineExceeded."""
        with self._changed:
            if self._changed.wait_for(lambda: version in self.reports, timeout):
                return self.reports[version]
        raise DeadlineExceeded(f"update {version} did not end within {timeout:g} s", op="update", code="ETIME")

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ---- the thread

    def _run(self) -> None:
        later = self._updates.later
        while True:
            event = later.pop(0) if later else self._inbox.get()
            if event is None:
                self._refuse_the_rest()
                return
            try:
                if isinstance(event, Offer):
                    self._update(event)
                else:
                    self._hear(event)
            except Exception:
                log.exception("controller: %s", type(event).__name__)

    def _refuse_the_rest(self) -> None:
        """Answer those whose offers were not heard."""
        offers = {event.version for event in self._updates.later if isinstance(event, Offer)}
        while not self._inbox.empty():
            event = self._inbox.get_nowait()
            if isinstance(event, Offer):
                offers.add(event.version)
        for version in offers:
            result = Result(version, False, ["controller"], "the controller is being closed", 0.0)
            for member in self._members.living:
                self._channel.send(member.addr, result, timeout=2.0)

    def _hear(self, event: Event) -> None:
        """What may come at any time."""
        self._members.alive(event)
        if isinstance(event, Hello):
            self._members.hello(event)
            seed_late_receivers(self._updates)
        elif isinstance(event, Here):
            self._members.took_up(event)
            seed_late_receivers(self._updates)
        elif isinstance(event, Lost):
            self._members.lost(event)
        elif isinstance(event, Leave):
            self._members.leave(event)
        elif isinstance(event, Resumed):
            self._members.resumed(event)

    def _update(self, offer: Offer) -> None:
        with self._changed:  # whoever asks from now on asks for how this one ends
            self.reports.pop(offer.version, None)
        report = self._updates.run(offer)
        with self._changed:
            self.reports[report.version] = report
            self._changed.notify_all()
        if self._on_report is not None:
            self._on_report(report)
