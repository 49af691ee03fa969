"""How an update ends: everybody exchanges old for new and goes on, or everybody stops and nothing is under way."""

from __future__ import annotations

import queue
import time

from fabric_rlweights.attempt import Attempt
from fabric_rlweights.channel import Channel, Event
from fabric_rlweights.hearing import Hearing
from fabric_rlweights.members import Member, Members, Who
from fabric_rlweights.protocol import Abort, Commit, Committed, Offer, Quiet, Resume, Resumed, Sent

__all__ = ["Ending"]

SEED_HOLDS = 0.2  #: of the time of an update that comes: so long it waits, at most, for the end of a seed


class Ending(Hearing):
    """Commits and aborts."""

    def __init__(self, members: Members, channel: Channel, inbox: queue.Queue[Event | None]) -> None:
        super().__init__(members, channel, inbox)
        self._fence = True  # somebody may still write for an update that failed; until one is committed

    def commit(self, update: Attempt) -> tuple[str, list[str]]:
        """Have every receiver exchange old for new, then have all go on; from here on the version is committed.

        Nobody serves the new version while somebody who answers still serves the old one. Returns what went wrong at
        single ranks.
        """
        if not update.seeding:
            self.members.version, self._fence = update.version, False
        self.members.committed = update.number
        receivers = update.side("receiver")
        for member in receivers:
            self.channel.send(member.addr, Commit(update.number, update.version))
        swapped = self._answers(update, receivers, Committed)
        # one that did not answer in time goes on when it has exchanged its weights: by then all others have
        fit = [m for m in receivers if m.who[1] not in swapped or not swapped[m.who[1]].problem]
        for member in fit:
            self.channel.send(member.addr, Resume(update.number))
        resumed = self._answers(update, [m for m in fit if m.who[1] in swapped], Resumed)
        update.times["committed"] = time.monotonic()
        bad: dict[str, str] = {}
        for member in receivers:
            answer = resumed.get(member.who[1]) or swapped.get(member.who[1])
            if member.who[1] not in resumed and (answer is None or not answer.problem):
                bad[member.name] = member.lost or "did not say that it serves it"
            elif answer is not None and answer.problem:
                bad[member.name] = answer.problem
            member.version = -1 if member.name in bad else update.version
        return "; ".join(f"{name}: {text}" for name, text in bad.items()), sorted(bad)

    def _answers(
        self, update: Attempt, receivers: list[Member], kind: type[Committed] | type[Resumed]
    ) -> dict[int, Committed | Resumed]:
        """Hear these receivers' answers until the deadline: rank -> answer."""
        answers: dict[int, Committed | Resumed] = {}
        while any(m.who[1] not in answers and not m.lost for m in receivers):
            try:
                event = self._inbox.get(timeout=max(0.0, update.deadline - time.monotonic()))
            except queue.Empty:
                break
            if event is None:
                self._inbox.put(None)
                break
            self._meanwhile(event)
            if isinstance(event, kind) and event.attempt == update.number:
                answers[event.rank] = event
            elif isinstance(event, Offer) and update.seeding:
                break  # nobody waits for a late one
        return answers

    def abort(self, update: Attempt, reason: str) -> None:
        """Have everybody stop; wait until nothing is under way, or remember that something may be."""
        members = update.members or self.members.living
        asked = [m for m in members if not m.lost]
        for member in asked:
            self.channel.send(member.addr, Abort(update.number, update.version, reason[:4000]), timeout=2.0)
        quiet: dict[Who, int] = {}  # -> the version that it goes on serving, or -1
        until, closing = update.deadline, False
        while any(m.who not in quiet and not m.lost for m in asked):
            if update.seeding:  # an update that comes has to wait for this
                offers = [event for event in self.later if isinstance(event, Offer)]
                until = min([until, *(offer.arrived + max(1.0, SEED_HOLDS * offer.seconds) for offer in offers)])
            try:
                event = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if event is None:
                self._inbox.put(None)
                closing = True
                break
            if isinstance(event, Offer) and not update.seeding and event.version == update.version:
                self.members.alive(event)  # the result, which is sent next, is the answer to it
                continue
            self._meanwhile(event)
            if isinstance(event, Quiet) and event.attempt == update.number:
                quiet[event.role, event.rank] = event.version
            elif isinstance(event, Sent) and event.attempt == update.number:
                # its writes had ended before it heard of this; when seeding it is a receiver that sends
                quiet["receiver" if update.seeding else "trainer", event.rank] = -1
        for member in asked:
            if member.who not in quiet and not member.lost and not closing:
                self.members.lose(member, "it did not say that it has stopped")
        self._fence = self._fence or any(m.who not in quiet for m in members)
        for member in update.members[:1] if update.seeding else update.side("receiver"):
            served = quiet.get(member.who, -1)  # a double buffer's, or of one that was not written to yet
            member.version = served if served == self.members.version else -1  # a donor goes on serving anyway
