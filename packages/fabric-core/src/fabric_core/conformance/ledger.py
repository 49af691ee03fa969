"""Random mixes of all verbs, and the account of what they must have done.

A `Plan` is data (hypothesis draws and shrinks it). `Ledger` gives each write a place of its own in the target's memory,
submits everything at once, in both directions, and knows what each byte, each count and each callback has to be.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fabric_core import Pages, ScatterDst, TransferEngine
from fabric_core.conformance.kit import GUARD, Calls, Memory, finish, pattern
from fabric_core.operations import Operation


@dataclass(frozen=True)
class Step:
    """One operation: `parts` writes of `length` bytes each (messages and barriers have none)."""

    verb: str  # "write", "paged", "scatter", "barrier", "send"
    sender: int  # 0 or 1
    receiver: int
    length: int
    parts: int
    gap: int  # untouched bytes before each part
    imm: int | None  # which of the receiver's immediates
    pin: bool


@dataclass(frozen=True)
class Plan:
    """Steps, and the order of everything that has no order."""

    steps: tuple[Step, ...]
    seed: int
    early: bool  # submit first and expect later, or the other way round


IMMS = 3
MAX_MESSAGE = 512


@dataclass
class Side:
    """One engine, what it receives into, and what it should hold in the end."""

    engine: TransferEngine
    source: Memory
    target: Memory
    image: bytearray
    imms: list[int]
    counts: list[int]
    got: Calls
    used: int = 0
    messages: list[bytes] = field(default_factory=list)

    def place(self, gap: int, length: int) -> int:
        at = self.used + gap
        self.used = at + length
        assert self.used <= len(self.image), "the plan is larger than the memory"
        return at


class Inbox:
    """An engine's messages over many plans: one small pool, emptied by whichever ledger is played."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.got = Calls()
        engine.submit_recvs(MAX_MESSAGE, 2, self._take)

    def _take(self, message: bytes) -> None:
        self.got(message)


class Ledger:
    """Plays a plan on two engines and checks the account."""

    def __init__(self, inboxes: tuple[Inbox, Inbox], capacity: int, plan: Plan) -> None:
        self.plan = plan
        self.random = random.Random(plan.seed)
        self.sides = [self._side(inbox, capacity, seed) for seed, inbox in enumerate(inboxes)]
        self.calls: list[tuple[Operation, Calls]] = []

    @staticmethod
    def _side(inbox: Inbox, capacity: int, seed: int) -> Side:
        engine, inbox.got = inbox.engine, Calls()
        source = Memory(engine, capacity, pattern(seed, capacity))
        target = Memory(engine, capacity, GUARD)
        imms = [engine.alloc_imm() for _ in range(IMMS)]
        return Side(engine, source, target, bytearray(GUARD * capacity), imms, [0] * IMMS, inbox.got)

    def play(self) -> None:
        submits = [self._prepare(step) for step in self.plan.steps]
        self.random.shuffle(submits)
        expectations = [] if self.plan.early else self._expect()
        for submit in submits:
            calls = Calls()
            self.calls.append((submit(calls), calls))
        expectations += self._expect() if self.plan.early else []
        finish([operation for operation, _calls in self.calls] + expectations)
        for side in self.sides:
            side.got.wait(len(side.messages))
        for _operation, calls in self.calls:
            calls.wait()
        self._check()
        for side in self.sides:
            side.engine.dereg_mr(side.source.handle)
            side.engine.dereg_mr(side.target.handle)

    def _expect(self) -> list[Operation]:
        """Expectations that add up to the counts, cut at random."""
        made: list[Operation] = []
        for side in self.sides:
            for imm, count in zip(side.imms, side.counts, strict=True):
                left = count
                while left:
                    take = self.random.randint(1, left)
                    left -= take
                    made.append(side.engine.expect_imm_count(imm, take))
        return made

    def _check(self) -> None:
        for number, side in enumerate(self.sides):
            if side.target.get() != side.image:
                landed = side.target.get()
                wrong = [i for i in range(len(landed)) if landed[i] != side.image[i]]
                raise AssertionError(f"side {number}: {len(wrong)} wrong bytes, {wrong[0]} to {wrong[-1]}")
            assert sorted(side.got.firsts) == sorted(side.messages)
            assert [side.engine.free_imm(imm) for imm in side.imms] == [0] * IMMS, "surplus immediates"
        for operation, calls in self.calls:
            assert calls.firsts == [operation]
            assert operation.state == "done"

    def _prepare(self, step: Step) -> Callable[[Calls], Operation]:
        """Enters the step into the books; returns what submits it."""
        sender, receiver = self.sides[step.sender], self.sides[step.receiver]
        engine = sender.engine
        imm = None if step.imm is None else receiver.imms[step.imm]
        pin: dict[str, Any] = {"nic": self.random.randrange(engine.nics)} if step.pin else {}
        if step.verb == "send":
            message = pattern(self.random.getrandbits(30), min(step.length, MAX_MESSAGE))
            receiver.messages.append(message)
            address = receiver.engine.address
            return lambda calls: engine.submit_send(address, message, calls)
        counted = step.parts if step.verb != "write" else 1
        if step.imm is not None:
            receiver.counts[step.imm] += counted
        desc = receiver.target.desc
        if step.verb == "barrier":
            assert imm is not None
            return lambda calls: engine.submit_barrier(None, calls, imm, [desc] * step.parts, **pin)
        handle = sender.source.handle
        if step.verb == "paged":
            return self._paged(step, sender, receiver, imm, pin)
        parts = []
        for _ in range(counted):
            at, to = self._from(step.length), receiver.place(step.gap, step.length)
            receiver.image[to : to + step.length] = sender.source.get(at, step.length)
            parts.append(ScatterDst(desc, step.length, at, to))
        if step.verb == "scatter":
            return lambda calls: engine.submit_scatter(None, calls, imm, handle, parts, **pin)
        part = parts[0]
        source, target = (handle, part.src_offset), (desc, part.dst_offset)
        return lambda calls: engine.submit_single_write(part.length, imm, source, target, calls, **pin)

    def _from(self, length: int) -> int:
        return self.random.randint(0, self.sides[0].source.nbytes - length)

    def _paged(
        self, step: Step, sender: Side, receiver: Side, imm: int | None, pin: dict[str, Any]
    ) -> Callable[[Calls], Operation]:
        stride = step.length + step.gap
        base = receiver.place(0, step.parts * stride)
        there = self.random.sample(range(step.parts), step.parts)
        here = [self.random.randrange(step.parts) for _ in range(step.parts)]
        start = self._from(step.parts * step.length)
        for i, j in zip(here, there, strict=True):
            at, to = start + i * step.length, base + j * stride
            receiver.image[to : to + step.length] = sender.source.get(at, step.length)
        source = (sender.source.handle, Pages(here, step.length, start))
        target = (receiver.target.desc, Pages(there, stride, base))
        engine = sender.engine
        return lambda calls: engine.submit_paged_writes(step.length, imm, source, target, calls, **pin)
