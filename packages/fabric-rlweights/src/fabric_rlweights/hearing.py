"""What the controller hears while an update is under way: answers for it, and what is put off until it has ended."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from fabric_rlweights.attempt import Attempt, NotCommitted, differs
from fabric_rlweights.channel import Channel, Event, Lost
from fabric_rlweights.members import Member, Members
from fabric_rlweights.protocol import Hello, Here, Leave, Offer, Ready, Received, Resumed, Sent

__all__ = ["Hearing"]


class Hearing:
    """Waits for answers, on the controller's thread. What belongs to nobody's update is put into `later`."""

    def __init__(self, members: Members, channel: Channel, inbox: queue.Queue[Event | None]) -> None:
        self.members, self.channel = members, channel
        self.later: list[Event] = []
        self._inbox = inbox

    def wait(
        self, update: Attempt, until: float, what: str, missing: Callable[[], list[Member]], watched: list[Member]
    ) -> None:
        """Hear events until nobody is missing. Raises NotCommitted: somebody watched is lost, refuses, or is late."""
        while late := missing():
            gone = [m for m in watched if m.lost]
            if gone:
                raise NotCommitted("; ".join(f"{m.name} is lost: {m.lost}" for m in gone), [m.name for m in gone])
            try:
                event = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                # receivers wait for trainers: when a trainer is late too, it is the cause
                names = [m.name for m in late if m.who[0] == "trainer"] or [m.name for m in late]
                raise NotCommitted(f"{', '.join(names)} did not {what} in time", names) from None
            if event is None:
                self._inbox.put(None)
                raise NotCommitted("the controller is being closed", ["controller"])
            self._hear(update, event)

    def _hear(self, update: Attempt, event: Event) -> None:
        if isinstance(event, Hello):
            self.later.append(event)  # whoever comes now is part of the next update
            return
        self.members.alive(event)
        if isinstance(event, Offer):
            if not update.seeding and event.version == update.version:
                update.offers[event.rank] = event
                return
            self.later.append(event)  # it has an update of its own
            if update.seeding:
                raise NotCommitted("an update comes, which serves everybody", [])
            raise differs(update, event)
        elif isinstance(event, Ready) and event.attempt == update.number:
            if event.problem:
                raise NotCommitted(f"receiver {event.rank} refuses: {event.problem}", [f"receiver {event.rank}"])
            update.ready[event.rank] = event
        elif isinstance(event, Sent) and event.attempt == update.number:
            if event.problem:
                raise self._blame(f"trainer {event.rank}", event.problem, event.culprit)
            update.sent[event.rank] = event
        elif isinstance(event, Received) and event.attempt == update.number:
            if event.problem:
                raise self._blame(f"receiver {event.rank}", event.problem, event.culprit)
            update.received[event.rank] = event
        elif isinstance(event, Here):
            self.members.took_up(event)
            if event.problem:
                raise NotCommitted(self.members.problem, [f"{event.role} {event.rank}"])
        elif isinstance(event, Lost):
            self.members.lost(event)
        elif isinstance(event, Leave):
            self.members.leave(event)

    def _meanwhile(self, event: Event) -> None:
        """What may come while an update ends."""
        if isinstance(event, Hello):
            self.later.append(event)
            return
        self.members.alive(event)
        if isinstance(event, Offer):
            self.later.append(event)
        elif isinstance(event, Here):
            self.members.took_up(event)
        elif isinstance(event, Lost):
            self.members.lost(event)
        elif isinstance(event, Leave):
            self.members.leave(event)
        elif isinstance(event, Resumed):
            self.members.resumed(event)

    def _blame(self, reporter: str, problem: str, culprit: str) -> NotCommitted:
        """Whoever is lost is to blame, not the one that noticed."""
        for member in self.members:
            if culprit and str(member.addr) == culprit and member.name != reporter:
                return NotCommitted(f"{reporter}: {problem}", [member.name])
        return NotCommitted(f"{reporter}: {problem}", [reporter])
