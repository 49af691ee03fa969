"""One update after the other, each all or nothing: everybody is ready, everything has arrived, and then commit."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from fabric_rlweights.channel import Channel, Event, Lost
from fabric_rlweights.digest import MASK
from fabric_rlweights.members import Member, Members, Who
from fabric_rlweights.plan import Plan
from fabric_rlweights.protocol import (
    Abort,
    Begin,
    Commit,
    Committed,
    Go,
    Hello,
    Here,
    Leave,
    Offer,
    Quiet,
    Ready,
    Received,
    Result,
    Resume,
    Resumed,
    Sent,
)
from fabric_rlweights.report import UpdateReport

__all__ = ["Attempt", "NotCommitted", "Updates"]

log = logging.getLogger("fabric.rlweights")
SEED_HOLDS = 0.2  #: of the time of an update that comes: so long it waits, at most, for the end of a seed


class NotCommitted(Exception):
    """Why an update fails, and by whom."""

    def __init__(self, reason: str, culprits: Iterable[str]) -> None:
        super().__init__(reason)
        self.culprits = sorted(set(culprits))


@dataclass
class Attempt:
    """An update under way, or a late receiver that gets the current version (`seeding`), and what was heard for it."""

    number: int
    version: int
    begin: float
    deadline: float
    members: list[Member] = field(default_factory=list)
    offers: dict[int, Offer] = field(default_factory=dict)
    ready: dict[int, Ready] = field(default_factory=dict)
    sent: dict[int, Sent] = field(default_factory=dict)
    received: dict[int, Received] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    seeding: bool = False

    def side(self, role: str) -> list[Member]:
        """The members of a role."""
        return [m for m in self.members if m.who[0] == role]


class Updates:
    """Carries out updates, on the controller's thread. What belongs to nobody's update is put into `later`."""

    def __init__(
        self, members: Members, channel: Channel, inbox: queue.Queue[Event | None], *, digests: bool = False
    ) -> None:
        self.members, self.channel, self.digests = members, channel, digests
        self.later: list[Event] = []
        self._inbox = inbox
        self._attempts = time.time_ns() // 1000 << 10  # larger than those of an earlier controller of this name
        self._fence = True  # somebody may still write for an update that failed; until one is committed

    @property
    def version(self) -> int:
        """That is committed; -1: none."""
        return self.members.version

    def begin(self, version: int, seconds: float, *, at: float | None = None, seeding: bool = False) -> Attempt:
        """Number a new attempt. `at`: when it was asked for, by the monotonic clock; None: now."""
        self._attempts += 1
        self.members.attempt = self._attempts
        now = at or time.monotonic()
        return Attempt(self._attempts, version, now, now + seconds, seeding=seeding)

    def run(self, offer: Offer) -> UpdateReport:
        """Carry out the update that a first offer asks for; ends by the offer's deadline."""
        self.members.alive(offer)
        update = self.begin(offer.version, offer.seconds, at=offer.arrived)
        if time.monotonic() >= update.deadline:  # nobody waits for it any more, and nobody is stopped for it
            reason = f"trainer {offer.rank}'s offer was not heard before its deadline: the controller was busy"
            log.warning("update %d: %s", update.version, reason)
            return UpdateReport(version=offer.version, committed=False, reason=reason, culprits=["controller"])
        update.offers[offer.rank] = offer
        grace = min(2.0, 0.2 * offer.seconds)  # what is left of the deadline for telling everybody that it failed
        work_by = update.deadline - grace
        culprits: list[str] = []
        reason = ""
        committed = False
        try:
            self._heard_before(update)
            self._prepare(update, work_by)
            self._transfer(update, work_by)
            committed = True
        except NotCommitted as error:
            reason, culprits = str(error), error.culprits
        except Exception as error:
            log.exception("update %d", update.version)
            reason, culprits = f"{type(error).__name__}: {error}", ["controller"]
        if committed:
            reason, culprits = self.commit(update)
        else:
            self.abort(update, reason)
        seconds = time.monotonic() - update.begin
        result = Result(update.version, committed, culprits, reason[:4000], seconds)
        for member in self.members.living:
            self.channel.send(member.addr, result, timeout=2.0)
        self.members.call_lost()
        plan = self.members.plan
        return UpdateReport(
            version=update.version,
            committed=committed,
            reason=reason,
            culprits=culprits,
            seconds=seconds,
            times={name: value - update.begin for name, value in update.times.items()},
            bytes=int(plan.nbytes.sum()) if plan is not None else 0,
            receivers=sorted(m.who[1] for m in update.side("receiver") if m.version == update.version),
        )

    # ---- its stages

    def _heard_before(self, update: Attempt) -> None:
        """Take the offers of this version that came while something else was under way. Raises NotCommitted."""
        now = time.monotonic()
        offers = [event for event in self.later if isinstance(event, Offer)]
        same = [offer for offer in offers if offer.version == update.version]
        self.later[:] = [event for event in self.later if event not in same]
        for offer in same:
            self.members.alive(offer)
            update.offers[offer.rank] = offer
        for offer in offers:
            if offer not in same and offer.arrived + offer.seconds > now:
                raise _differs(update, offer)

    def _prepare(self, update: Attempt, until: float) -> None:
        """Everybody has taken up a plan, every trainer has offered, every receiver has made room."""
        members = self.members
        if members.stale and not members.replan():
            gone = [m.name for m in members if m.lost]
            raise NotCommitted(f"there is no plan: {members.problem}", gone or ["controller"])
        living = members.living
        self.wait(update, until, "take up the plan", lambda: [m for m in living if not m.here], living)
        update.members = living
        trainers, receivers = update.side("trainer"), update.side("receiver")
        self.wait(
            update, until, "offer this version", lambda: [m for m in trainers if not self._offers(update, m)], living
        )
        update.times["offered"] = time.monotonic()
        for member in receivers:
            left = until - time.monotonic()
            if left <= 0:  # nobody is stopped for what cannot succeed
                raise NotCommitted("no time was left when everybody had offered", ["controller"])
            begin = Begin(update.number, update.version, left, self.digests, self._fence)
            self.channel.send(member.addr, begin)
        self.wait(
            update, until, "get ready to be written to",
            lambda: [m for m in receivers if m.who[1] not in update.ready], living,
        )  # fmt: skip
        update.times["ready"] = time.monotonic()
        self._fence = True  # from here on somebody writes

    def _offers(self, update: Attempt, member: Member) -> bool:
        offer = update.offers.get(member.who[1])
        return offer is not None and offer.plan == self.members.number

    def _transfer(self, update: Attempt, until: float) -> None:
        plan = self.members.plan
        assert plan is not None
        trainers, receivers = update.side("trainer"), update.side("receiver")
        addrs = {m.who[1]: m.addr.to_bytes() for m in trainers}
        meeting = {rank: (offer.desc, offer.imm) for rank, offer in update.offers.items()}
        for member in trainers:
            to, near = _neighbours(plan, member.who[1])
            go = Go(
                update.number, update.version, max(0.0, until - time.monotonic()), self.digests,
                {r: update.ready[r].descs for r in to}, {r: update.ready[r].imm for r in to},
                {r: meeting[r] for r in near}, {r: addrs[r] for r in near},
            )  # fmt: skip
            self.channel.send(member.addr, go)
        self.wait(
            update, until, "finish",
            lambda: [m for m in trainers if m.who[1] not in update.sent]
            + [m for m in receivers if m.who[1] not in update.received],
            update.members,
        )  # fmt: skip
        update.times["transferred"] = time.monotonic()
        if self.digests:
            self.compare(update, receivers)

    def compare(self, update: Attempt, receivers: list[Member]) -> None:
        """Compare digests. Raises NotCommitted naming tensors that are not what was sent."""
        plan = self.members.plan
        assert plan is not None
        tensors = plan.destination.tensors
        names = {(int(r), int(n)): name for r, n, name in zip(tensors.rank, tensors.number, tensors.names, strict=True)}
        for member in receivers:
            rank = member.who[1]
            sums: dict[int, int] = {}
            for sent in update.sent.values():
                for number, part in sent.digests.get(rank, {}).items():
                    sums[number] = (sums.get(number, 0) + part) & MASK
            held = update.received[rank].digests
            wrong = sorted(n for n in sums.keys() | held.keys() if sums.get(n) != held.get(n))
            if wrong:
                what = ", ".join(names.get((rank, n), str(n)) for n in wrong[:3])
                raise NotCommitted(
                    f"{member.name} does not hold what was sent: {what} ({len(wrong)} tensors)", [member.name]
                )

    # ---- hearing

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
            raise _differs(update, event)
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

    # ---- how it ends

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
        quiet: set[Who] = set()
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
                quiet.add((event.role, event.rank))
            elif isinstance(event, Sent) and event.attempt == update.number:
                # its writes had ended before it heard of this; when seeding it is a receiver that sends
                quiet.add(("receiver" if update.seeding else "trainer", event.rank))
        for member in asked:
            if member.who not in quiet and not member.lost and not closing:
                self.members.lose(member, "it did not say that it has stopped")
        self._fence = self._fence or any(m.who not in quiet for m in members)
        for member in update.members[:1] if update.seeding else update.side("receiver"):
            member.version = -1  # a donor goes on serving


def _differs(update: Attempt, offer: Offer) -> NotCommitted:
    text = f"trainer {offer.rank} offers version {offer.version} while others offer {update.version}"
    return NotCommitted(text, [f"trainer {offer.rank}"])


def _neighbours(plan: Plan, rank: int) -> tuple[set[int], set[int]]:
    """Return the inference ranks that a trainer writes to, and the trainers with which it exchanges magnitudes."""
    exchange = plan.exchange
    to = set(np.unique(plan.receiver[plan.trainer == rank]).tolist())
    near = set(exchange.receiver[exchange.sender == rank].tolist())
    near |= set(exchange.sender[exchange.receiver == rank].tolist())
    return to, near
