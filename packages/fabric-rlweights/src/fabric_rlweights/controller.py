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
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from fabric_core import ConfigError, DeadlineExceeded, NetAddr, ProtocolError, TransferEngine
from fabric_rlweights.assign import assignment
from fabric_rlweights.channel import Channel, Event, Lost
from fabric_rlweights.digest import MASK
from fabric_rlweights.meta import EngineTable, TrainerTable
from fabric_rlweights.plan import Options, Plan, make_plan
from fabric_rlweights.protocol import (
    Abort,
    Begin,
    Commit,
    Committed,
    Go,
    Hello,
    Here,
    Offer,
    Quiet,
    Ready,
    Received,
    Result,
    Seed,
    Sent,
)
from fabric_rlweights.report import UpdateReport
from fabric_rlweights.tables import destination, holdings

__all__ = ["Controller"]

log = logging.getLogger("fabric.rlweights")
Who = tuple[str, int]  #: ("trainer", 3)
MAX_TABLE = 1 << 30  #: bytes of a table, unpacked


@dataclass
class Member:
    """A rank that said hello."""

    who: Who
    addr: NetAddr
    table: Any
    told: bytes = b""  #: what it was last assigned, without the plan's number
    here: bool = False  #: it has taken that up
    lost: str = ""
    version: int = -1  #: a receiver's
    problem: str = ""

    @property
    def name(self) -> str:
        return f"{self.who[0]} {self.who[1]}"


class _NotCommitted(Exception):
    def __init__(self, reason: str, culprits: Iterable[str]) -> None:
        super().__init__(reason)
        self.culprits = sorted(set(culprits))


@dataclass
class _Update:
    attempt: int
    version: int
    begin: float
    deadline: float
    members: list[Member]
    offers: dict[int, Offer] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    seeding: bool = False  #: no update of all, but a late receiver gets the current version


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
        self.engine, self.digests = engine, digests
        self._wanted = {"trainer": trainers, "receiver": receivers}
        self._options = options or Options()
        self._on_report = on_report
        self._members: dict[Who, Member] = {}
        self._inbox: queue.Queue[Event | None] = queue.Queue()
        self._later: list[Event] = []
        self._channel = Channel(engine, self._inbox)  # type: ignore[arg-type]
        self.plan: Plan | None = None
        self._plans = 0
        self._attempts = 0
        self._version = -1
        self._fence = True
        self._stale = True  # the plan does not fit the members any more
        self._changed = threading.Condition()
        self.problem = ""
        self.reports: dict[int, UpdateReport] = {}  #: by version; a version that was tried again keeps its last
        self._thread = threading.Thread(target=self._run, name="fabric-rl-controller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._inbox.put(None)
        self._thread.join(10.0)
        self._channel.close()

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def ready(self) -> bool:
        """Whether everybody has taken up the plan."""
        return not self._stale and all(m.here for m in self._members.values() if not m.lost)

    def wait_ready(self, timeout: float) -> None:
        """Wait for `ready`. Raises ConfigError: there can be no plan; DeadlineExceeded: somebody is missing."""
        with self._changed:
            if self._changed.wait_for(lambda: self.ready or bool(self.problem), timeout) and self.ready:
                return
        if self.problem:
            raise ConfigError(self.problem)
        have = {role: sum(who[0] == role for who in self._members) for role in self._wanted}
        late = [m.name for m in self._members.values() if not m.here]
        raise DeadlineExceeded(
            f"not ready within {timeout:g} s: {have['trainer']} of {self._wanted['trainer']} trainers and "
            f"{have['receiver']} of {self._wanted['receiver']} receivers said hello; without the plan: "
            f"{', '.join(late) or 'nobody'}",
            op="plan",
            code="ETIME",
        )

    def wait_report(self, version: int, timeout: float) -> UpdateReport:
        """Wait for the end of an update. Raises DeadlineExceeded."""
        with self._changed:
            if self._changed.wait_for(lambda: version in self.reports, timeout):
                return self.reports[version]
        raise DeadlineExceeded(f"update {version} did not end within {timeout:g} s", op="update", code="ETIME")

    # ---- the thread

    def _run(self) -> None:
        while True:
            event = self._later.pop(0) if self._later else self._inbox.get()
            if event is None:
                return
            try:
                if isinstance(event, Offer):
                    self._offer(event)
                else:
                    self._hear(event)
            except Exception:
                log.exception("controller: %s", type(event).__name__)

    def _hear(self, event: Event) -> None:
        """What may come at any time."""
        self._alive(event)
        if isinstance(event, Hello):
            self._hello(event)
        elif isinstance(event, Here):
            self._took_up(event)
            self._seed()
        elif isinstance(event, Lost):
            self._lost(event)

    def _took_up(self, event: Here) -> None:
        member = self._members.get((event.role, event.rank))
        if member is not None and event.plan == self._plans:
            member.here, member.problem = not event.problem, event.problem
            if event.problem:
                self.problem = f"{member.name} cannot take up the plan: {event.problem}"
            self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _alive(self, event: Event) -> None:
        """Whoever speaks is not lost: it was slow, or the path to it was."""
        rank = getattr(event, "rank", -1)
        role = getattr(event, "role", "trainer" if isinstance(event, Offer | Sent) else "receiver")
        member = self._members.get((role, rank))
        if member is not None and member.lost:
            member.lost, member.here, self._stale = "", False, True

    def _lost(self, event: Lost) -> Member | None:
        for member in self._members.values():
            if str(member.addr) == event.addr and not member.lost:
                member.lost, member.here = event.reason, False
                self._stale = True
                log.warning("%s is lost: %s", member.name, event.reason)
                return member
        return None

    def _hello(self, hello: Hello) -> None:
        kind = TrainerTable if hello.role == "trainer" else EngineTable
        try:
            unpacker = zlib.decompressobj()
            text = unpacker.decompress(hello.table, MAX_TABLE)
            if unpacker.unconsumed_tail:
                raise ProtocolError(f"a table of more than {MAX_TABLE} bytes")
            table = kind.model_validate_json(text)
            addr = NetAddr.from_bytes(hello.addr)
        except (ProtocolError, ValidationError, zlib.error) as error:
            self.problem = f"{hello.role} {hello.rank} sent a table that is none: {error}"
            log.warning("%s", self.problem)
            return
        who = (hello.role, hello.rank)
        self._members[who] = Member(who, addr, table, version=hello.version)
        self._stale, self.problem = True, ""
        have = {role: sum(w[0] == role for w in self._members) for role in self._wanted}
        if all(have[role] >= count for role, count in self._wanted.items()):
            self._replan()
        self._notify()

    def _replan(self) -> bool:
        """Make the plan for whoever is there, and tell those to whom something is new. Returns whether there is one."""
        living = [m for m in self._members.values() if not m.lost]
        try:
            params, held = holdings([m.table for m in living if m.who[0] == "trainer"])
            there = destination([m.table for m in living if m.who[0] == "receiver"], params)
            self.plan = plan = make_plan(params, held, there, options=self._options)
        except ConfigError as error:
            gone = ", ".join(m.name for m in self._members.values() if m.lost)
            self.problem = str(error) + (f" (lost: {gone})" if gone else "")
            self.plan = None
            log.warning("there can be no plan: %s", self.problem)
            self._notify()
            return False
        self._plans += 1
        self._stale, self.problem = False, ""
        for member in living:
            message, body = assignment(
                plan, member.who, self._plans, {m.who[1]: m.addr for m in living if m.who[0] == "trainer"}
            )
            member.told, member.here = body, False
            self._channel.send(member.addr, message)
        return True

    # ---- an update

    def _offer(self, offer: Offer) -> None:
        begin = time.monotonic()
        self._alive(offer)
        self._attempts += 1
        update = _Update(self._attempts, offer.version, begin, begin + offer.seconds, [])
        update.offers[offer.rank] = offer
        grace = min(2.0, 0.2 * offer.seconds)  # what is left of the deadline for telling everybody that it failed
        work_by = update.deadline - grace
        culprits: list[str] = []
        reason = ""
        committed = False
        try:
            self._prepare(update, work_by)
            self._transfer(update, work_by)
            committed = True
        except _NotCommitted as error:
            reason, culprits = str(error), error.culprits
        except Exception as error:
            log.exception("update %d", update.version)
            reason, culprits = f"{type(error).__name__}: {error}", ["controller"]
        if committed:
            reason, culprits = self._commit(update)
        else:
            self._abort(update, reason)
        seconds = time.monotonic() - begin
        report = UpdateReport(
            version=update.version,
            committed=committed,
            reason=reason,
            culprits=culprits,
            seconds=seconds,
            times={name: value - begin for name, value in update.times.items()},
            bytes=int(self.plan.nbytes.sum()) if self.plan is not None else 0,
            receivers=sorted(
                m.who[1] for m in update.members if m.who[0] == "receiver" and m.version == update.version
            ),
        )
        result = Result(update.version, committed, culprits, reason[:4000], seconds)
        for member in list(self._members.values()):
            if not member.lost:
                self._channel.send(member.addr, result, timeout=2.0)
        with self._changed:
            self.reports[update.version] = report
            self._changed.notify_all()
        if self._on_report is not None:
            self._on_report(report)

    def _side(self, update: _Update, role: str) -> list[Member]:
        return [m for m in update.members if m.who[0] == role]

    def _prepare(self, update: _Update, until: float) -> None:
        """Everybody has taken up a plan, every trainer has offered, every receiver has made room."""
        if self._stale and not self._replan():
            gone = [m.name for m in self._members.values() if m.lost]
            raise _NotCommitted(f"there is no plan: {self.problem}", gone or ["controller"])
        living = [m for m in self._members.values() if not m.lost]
        self._await(update, until, "take up the plan", lambda: [m for m in living if not m.here], living)
        update.members = living
        trainers = self._side(update, "trainer")
        offered = update.offers
        self._await(
            update, until, "offer this version", lambda: [m for m in trainers if not self._offers(offered, m)], living
        )
        update.times["offered"] = time.monotonic()
        self._ready: dict[int, Ready] = {}
        receivers = self._side(update, "receiver")
        for member in receivers:
            left = max(0.0, until - time.monotonic())
            begin = Begin(update.attempt, update.version, left, self.digests, self._fence)
            self._channel.send(member.addr, begin)
        self._await(
            update, until, "get ready to be written to",
            lambda: [m for m in receivers if m.who[1] not in self._ready], living,
        )  # fmt: skip
        update.times["ready"] = time.monotonic()
        self._fence = True  # until everybody has said that nothing is under way

    def _offers(self, offered: dict[int, Offer], member: Member) -> bool:
        offer = offered.get(member.who[1])
        return offer is not None and offer.plan == self._plans

    def _transfer(self, update: _Update, until: float) -> None:
        assert self.plan is not None
        trainers, receivers = self._side(update, "trainer"), self._side(update, "receiver")
        addrs = {m.who[1]: m.addr.to_bytes() for m in trainers}
        meeting = {rank: (offer.desc, offer.imm) for rank, offer in update.offers.items()}
        exchange = self.plan.exchange
        self._sent: dict[int, Sent] = {}
        self._received: dict[int, Received] = {}
        for member in trainers:
            rank = member.who[1]
            to = set(np.unique(self.plan.receiver[self.plan.trainer == rank]).tolist())
            near = set(exchange.receiver[exchange.sender == rank].tolist())
            near |= set(exchange.sender[exchange.receiver == rank].tolist())
            go = Go(
                update.attempt, update.version, max(0.0, until - time.monotonic()), self.digests,
                {r: self._ready[r].descs for r in to}, {r: self._ready[r].imm for r in to},
                {r: meeting[r] for r in near}, {r: addrs[r] for r in near},
            )  # fmt: skip
            self._channel.send(member.addr, go)
        self._await(
            update, until, "finish",
            lambda: [m for m in trainers if m.who[1] not in self._sent]
            + [m for m in receivers if m.who[1] not in self._received],
            update.members,
        )  # fmt: skip
        update.times["transferred"] = time.monotonic()
        if self.digests:
            self._compare(receivers)

    def _compare(self, receivers: list[Member]) -> None:
        assert self.plan is not None
        tensors = self.plan.destination.tensors
        names = {(int(r), int(n)): name for r, n, name in zip(tensors.rank, tensors.number, tensors.names, strict=True)}
        for member in receivers:
            rank = member.who[1]
            sums: dict[int, int] = {}
            for sent in self._sent.values():
                for number, part in sent.digests.get(rank, {}).items():
                    sums[number] = (sums.get(number, 0) + part) & MASK
            held = self._received[rank].digests
            wrong = sorted(n for n in sums.keys() | held.keys() if sums.get(n) != held.get(n))
            if wrong:
                what = ", ".join(names.get((rank, n), str(n)) for n in wrong[:3])
                raise _NotCommitted(
                    f"{member.name} does not hold what was sent: {what} ({len(wrong)} tensors)", [member.name]
                )

    def _await(
        self, update: _Update, until: float, what: str, missing: Callable[[], list[Member]], watched: list[Member]
    ) -> None:
        """Hear events until nobody is missing. Raises _NotCommitted: somebody watched is lost, refuses, or is late."""
        while late := missing():
            gone = [m for m in watched if m.lost]
            if gone:
                raise _NotCommitted("; ".join(f"{m.name} is lost: {m.lost}" for m in gone), [m.name for m in gone])
            try:
                event = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                # receivers wait for trainers: when a trainer is late too, it is the cause
                names = [m.name for m in late if m.who[0] == "trainer"] or [m.name for m in late]
                raise _NotCommitted(f"{', '.join(names)} did not {what} in time", names) from None
            if event is None:
                self._inbox.put(None)
                raise _NotCommitted("the controller is being closed", ["controller"])
            self._during(update, event)

    def _during(self, update: _Update, event: Event) -> None:
        if not isinstance(event, Hello):
            self._alive(event)
        if isinstance(event, Hello):
            self._later.append(event)  # whoever comes now is part of the next update
        elif isinstance(event, Offer):
            if update.seeding:
                self._later.append(event)
            elif event.version == update.version:
                update.offers[event.rank] = event
            else:
                raise _NotCommitted(
                    f"trainer {event.rank} offers version {event.version} while others offer {update.version}",
                    [f"trainer {event.rank}"],
                )
        elif isinstance(event, Ready) and event.attempt == update.attempt:
            if event.problem:
                raise _NotCommitted(f"receiver {event.rank} refuses: {event.problem}", [f"receiver {event.rank}"])
            self._ready[event.rank] = event
        elif isinstance(event, Sent) and event.attempt == update.attempt:
            if event.problem:
                raise self._blame(f"trainer {event.rank}", event.problem, event.culprit)
            self._sent[event.rank] = event
        elif isinstance(event, Received) and event.attempt == update.attempt:
            if event.problem:
                raise self._blame(f"receiver {event.rank}", event.problem, event.culprit)
            self._received[event.rank] = event
        elif isinstance(event, Here):
            self._took_up(event)
            if event.problem:
                raise _NotCommitted(self.problem, [f"{event.role} {event.rank}"])
        elif isinstance(event, Lost):
            self._lost(event)

    def _blame(self, reporter: str, problem: str, culprit: str) -> _NotCommitted:
        """Whoever is lost is to blame, not the one that noticed."""
        for member in self._members.values():
            if culprit and str(member.addr) == culprit:
                if member.name != reporter:
                    return _NotCommitted(f"{reporter}: {problem}", [member.name])
                break
        return _NotCommitted(f"{reporter}: {problem}", [reporter])

    def _commit(self, update: _Update) -> tuple[str, list[str]]:
        """Tell every receiver; from here on the version is committed. Returns what went wrong at single ranks."""
        if not update.seeding:
            self._version, self._fence = update.version, False
        receivers = self._side(update, "receiver")
        answers: dict[int, Committed] = {}
        for member in receivers:
            self._channel.send(member.addr, Commit(update.attempt, update.version))
        while any(m.who[1] not in answers and not m.lost for m in receivers):
            try:
                event = self._inbox.get(timeout=max(0.0, update.deadline - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(event, Committed) and event.attempt == update.attempt:
                answers[event.rank] = event
            elif isinstance(event, Lost):
                self._lost(event)
            elif event is None or isinstance(event, Hello | Offer):
                self._later.append(event)  # type: ignore[arg-type]
                if event is None:
                    self._inbox.put(None)
                    break
        update.times["committed"] = time.monotonic()
        bad: dict[str, str] = {}
        for member in receivers:
            answer = answers.get(member.who[1])
            if answer is None:
                bad[member.name] = member.lost or "did not say that it serves it"
                member.version = -1
            elif answer.problem:
                bad[member.name] = answer.problem
                member.version = -1
            else:
                member.version = update.version
        return "; ".join(f"{name}: {text}" for name, text in bad.items()), sorted(bad)

    def _abort(self, update: _Update, reason: str) -> None:
        """Have everybody stop; wait until nothing is under way, or remember that something may be."""
        members = update.members or [m for m in self._members.values() if not m.lost]
        for member in members:
            if not member.lost:
                self._channel.send(member.addr, Abort(update.attempt, update.version, reason[:4000]), timeout=2.0)
        quiet: set[Who] = set()
        while any(m.who not in quiet and not m.lost for m in members):
            try:
                event = self._inbox.get(timeout=max(0.0, update.deadline - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(event, Quiet) and event.attempt == update.attempt:
                quiet.add((event.role, event.rank))
            elif isinstance(event, Sent) and event.attempt == update.attempt:
                quiet.add(("trainer", event.rank))  # its writes had ended before it heard of this
            elif isinstance(event, Lost):
                self._lost(event)
            elif isinstance(event, Hello):
                self._later.append(event)
            elif isinstance(event, Here):
                self._took_up(event)
            elif isinstance(event, Offer) and (update.seeding or event.version != update.version):
                self._later.append(event)
            elif event is None:
                self._inbox.put(None)
                break
        for member in members:
            if member.who not in quiet and not member.lost:  # the next update does without it, unless it speaks first
                member.lost, member.here, self._stale = "it did not say that it has stopped", False, True
        self._fence = any(m.who not in quiet for m in members if m.who[0] == "trainer")
        for member in update.members[:1] if update.seeding else self._side(update, "receiver"):
            member.version = -1  # a donor goes on serving

    # ---- late joiners

    def _seed(self) -> None:
        """Give a receiver that came late the current version, from one that serves it and has the same tensors."""
        if not self.ready or self._version < 0 or self.plan is None:
            return
        for member in self._members.values():
            if member.who[0] == "receiver" and not member.lost and member.version != self._version:
                donor = self._donor(member)
                if donor is not None:
                    self._seed_one(member, donor)

    def _donor(self, late: Member) -> Member | None:
        for member in self._members.values():
            same = member.who[0] == "receiver" and not member.lost and member.version == self._version
            if same and _alike(member.table, late.table):
                return member
        return None

    def _seed_one(self, late: Member, donor: Member, seconds: float = 60.0) -> None:
        self._attempts += 1
        update = _Update(
            self._attempts, self._version, time.monotonic(), time.monotonic() + seconds, [late, donor], seeding=True
        )
        self._ready, self._sent, self._received = {}, {}, {}
        assert self.plan is not None
        tensors = int((self.plan.destination.tensors.rank == late.who[1]).sum())
        begin = Begin(update.attempt, self._version, seconds, self.digests, True, tensors, donor.addr.to_bytes())
        try:
            self._channel.send(late.addr, begin)
            self._await(update, update.deadline, "get ready", lambda: [] if self._ready else [late], [late, donor])
            ready = self._ready[late.who[1]]
            self._channel.send(
                donor.addr,
                Seed(update.attempt, late.who[1], self._version, seconds, ready.imm, ready.descs, self.digests),
            )
            self._await(update, update.deadline, "send", lambda: [] if self._sent else [donor], [late, donor])
            self._await(update, update.deadline, "receive", lambda: [] if self._received else [late], [late, donor])
            if self.digests:
                self._compare([late])
        except _NotCommitted as error:
            log.warning("%s did not get version %d from %s: %s", late.name, self._version, donor.name, error)
            self._abort(update, str(error))
            return
        problem, _ = self._commit_one(update, late)
        if problem:
            log.warning("%s does not serve version %d: %s", late.name, self._version, problem)

    def _commit_one(self, update: _Update, late: Member) -> tuple[str, list[str]]:
        update.members = [late]
        return self._commit(update)


def _alike(one: EngineTable, other: EngineTable) -> bool:
    """Whether two ranks have the same tensors, made of the same boxes, in the same order."""

    def bare(table: EngineTable) -> Any:
        tensors = [t.model_copy(update={"address": 0}) for t in table.tensors]
        return tensors, table.entries, table.fallback

    return bool(bare(one) == bare(other))
