"""One update after the other, each all or nothing: everybody is ready, everything has arrived, and then commit."""

from __future__ import annotations

import logging
import queue
import time

import numpy as np

from fabric_rlweights.attempt import Attempt, NotCommitted, differs
from fabric_rlweights.channel import Channel, Event
from fabric_rlweights.digest import MASK
from fabric_rlweights.ending import Ending
from fabric_rlweights.members import Member, Members
from fabric_rlweights.plan import Plan
from fabric_rlweights.protocol import Begin, Go, Offer, Result
from fabric_rlweights.report import UpdateReport

__all__ = ["Updates"]

log = logging.getLogger("fabric.rlweights")


class Updates(Ending):
    """Carries out updates, on the controller's thread."""

    def __init__(
        self, members: Members, channel: Channel, inbox: queue.Queue[Event | None], *, digests: bool = False
    ) -> None:
        super().__init__(members, channel, inbox)
        self.digests = digests
        self._attempts = time.time_ns() // 1000 << 10  # larger than those of an earlier controller of this name

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
                raise differs(update, offer)

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


def _neighbours(plan: Plan, rank: int) -> tuple[set[int], set[int]]:
    """Return the inference ranks that a trainer writes to, and the trainers with which it exchanges magnitudes."""
    exchange = plan.exchange
    to = set(np.unique(plan.receiver[plan.trainer == rank]).tolist())
    near = set(exchange.receiver[exchange.sender == rank].tolist())
    near |= set(exchange.sender[exchange.receiver == rank].tolist())
    return to, near
