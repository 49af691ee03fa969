"""Who has said hello, who is lost, and the plan for those who are there."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from fabric_core import ConfigError, NetAddr, ProtocolError
from fabric_rlweights.assign import assignment
from fabric_rlweights.channel import Channel, Event, Lost
from fabric_rlweights.meta import EngineTable, TrainerTable
from fabric_rlweights.plan import Options, Plan, make_plan
from fabric_rlweights.protocol import Call, Hello, Here, Leave, Offer, Resumed, Sent, Stop
from fabric_rlweights.tables import destination, holdings

__all__ = ["Member", "Members", "Who"]

log = logging.getLogger("fabric.rlweights")
Who = tuple[str, int]  #: ("trainer", 3)
MAX_TABLE = 1 << 30  #: bytes of a table, unpacked


@dataclass
class Member:
    """A rank that said hello."""

    who: Who
    addr: NetAddr
    table: Any
    here: bool = False  #: it has taken up the plan
    lost: str = ""
    left: bool = False  #: it said that it goes
    version: int = -1  #: a receiver's

    @property
    def name(self) -> str:
        return f"{self.who[0]} {self.who[1]}"


class Members:
    """The book of all ranks. Changed by the controller's thread alone; others read `ready`, `problem`, `missing`."""

    def __init__(self, wanted: dict[str, int], options: Options, channel: Channel, changed: Callable[[], None]) -> None:
        """`wanted`: how many of each role the first plan waits for. `changed`: called when `ready` may have."""
        self.wanted = wanted
        self.plan: Plan | None = None
        self.number = time.time_ns() // 1000 << 10  #: counts the plans; no two controllers' are the same
        self.version = -1  #: that is committed
        self.attempt = 0  #: the last one that was begun
        self.committed = 0  #: the last one that was committed
        self.stale = True  #: the plan does not fit the members any more
        self.problem = ""  #: why there is no plan, or who cannot take it up
        self._all: dict[Who, Member] = {}
        self._options, self._channel, self._changed = options, channel, changed

    # ---- asking

    def __iter__(self) -> Any:
        return iter(list(self._all.values()))

    def get(self, role: str, rank: int) -> Member | None:
        """Return a member, if it has ever said hello."""
        return self._all.get((role, rank))

    @property
    def living(self) -> list[Member]:
        """Those that are not lost."""
        return [m for m in self if not m.lost]

    @property
    def ready(self) -> bool:
        """Whether everybody has taken up the plan."""
        return not self.stale and all(m.here for m in self.living)

    def missing(self) -> str:
        """Say who has not come, or has no plan."""
        have = {role: sum(m.who[0] == role for m in self) for role in self.wanted}
        late = [m.name for m in self if not m.here]
        return (
            f"{have['trainer']} of {self.wanted['trainer']} trainers and {have['receiver']} of "
            f"{self.wanted['receiver']} receivers said hello; without the plan: {', '.join(late) or 'nobody'}"
        )

    # ---- hearing

    def hello(self, hello: Hello) -> None:
        """Take somebody in, and plan if everybody who was waited for is there."""
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
        old = self._all.get(who)
        if old is not None and old.addr != addr and not old.left:
            reason = f"{old.name} has said hello from {addr}: the one at {old.addr} takes part no more"
            log.warning("%s", reason)
            self._channel.send(old.addr, Stop(self.attempt, -1, reason, True), timeout=2.0)
        self._all[who] = member = Member(who, addr, table, version=hello.version)
        if hello.version >= 0 and old is not None and old.addr == addr and old.version == self.version:
            member.version = self.version  # it has said so since it said hello
        elif 0 <= hello.version != self.version >= 0:
            member.version = -1
            reason = f"version {self.version} is committed, this rank serves {hello.version}"
            self._channel.send(addr, Stop(self.attempt, self.version, reason, False))
        if old is not None and old.here and not self.stale and (old.addr, old.table) == (addr, table):
            member.here = True  # it was called, or took us for lost: it has the plan, and nobody needs another one
            self._changed()
            return
        self.stale, self.problem = True, ""
        if all(sum(m.who[0] == role for m in self) >= count for role, count in self.wanted.items()):
            self.replan()
        self._changed()

    def alive(self, event: Event) -> None:
        """Whoever speaks is not lost: it was slow, or the path to it was."""
        if isinstance(event, Hello | Leave | Sent):  # see hello() and leave(); of Sent one cannot tell who sends it
            return
        role = getattr(event, "role", "trainer" if isinstance(event, Offer) else "receiver")
        member = self.get(role, getattr(event, "rank", -1))
        if member is not None and member.lost and not member.left:
            member.lost, member.here, self.stale = "", False, True
            self._channel.send(member.addr, Call())  # it may have missed a version meanwhile: its hello says so

    def call_lost(self) -> None:
        """Ask those that were taken for lost whether they are there: not everybody speaks without being asked."""
        for member in self:
            if member.lost and not member.left:
                self._channel.send(member.addr, Call(), timeout=2.0)

    def resumed(self, event: Resumed) -> None:
        """A receiver serves what was committed last, if later than it should."""
        member = self.get("receiver", event.rank)
        if member is not None and event.attempt == self.committed and not event.problem:
            member.version = self.version

    def leave(self, event: Leave) -> None:
        """Somebody goes; the next plan does without it."""
        member = self.get(event.role, event.rank)
        if member is not None and member.addr.to_bytes() == event.addr:
            member.left = True
            self.lose(member, "it has left")

    def lost(self, event: Lost) -> None:
        """Somebody is gone, or a message to it did not arrive."""
        if event.reason.startswith(Call.__name__):
            return  # it was lost when it was called; if it is not any more, it has spoken since
        for member in self:
            if str(member.addr) == event.addr and not member.lost:
                self.lose(member, event.reason)
                log.warning("%s is lost: %s", member.name, event.reason)
                return

    def lose(self, member: Member, reason: str) -> None:
        """The next plan does without it, unless it speaks first."""
        member.lost, member.here, self.stale = reason, False, True

    def took_up(self, event: Here) -> None:
        """A rank has taken up a plan, or says why it cannot."""
        member = self.get(event.role, event.rank)
        if member is not None and event.plan == self.number:
            member.here = not event.problem
            if event.problem:
                self.problem = f"{member.name} cannot take up the plan: {event.problem}"
                self.stale = True  # the next update has it tried again: memory that was short may be there
            self._changed()

    # ---- planning

    def replan(self) -> bool:
        """Make the plan for whoever is there, and tell everybody. Returns whether there is one."""
        living = self.living
        try:
            params, held = holdings([m.table for m in living if m.who[0] == "trainer"])
            there = destination([m.table for m in living if m.who[0] == "receiver"], params)
            self.plan = plan = make_plan(params, held, there, options=self._options)
        except ConfigError as error:
            gone = ", ".join(m.name for m in self if m.lost)
            self.problem = str(error) + (f" (lost: {gone})" if gone else "")
            self.plan = None
            log.warning("there can be no plan: %s", self.problem)
            self._changed()
            return False
        self.number += 1
        self.stale, self.problem = False, ""
        trainers = {m.who[1]: m.addr for m in living if m.who[0] == "trainer"}
        for member in living:
            member.here = False
            self._channel.send(member.addr, assignment(plan, member.who, self.number, trainers))
        return True
