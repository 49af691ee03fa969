"""The receiving side of rounds: invite a peer to write, check what came, take the memory back."""

from __future__ import annotations

import base64
import queue
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from chaos.book import SLOT, Shape
from chaos.ledger import Entry
from chaos.life import GUARDS, Life, Peer, Slot
from fabric_core import EngineClosed, FabricError

__all__ = ["Receiver", "Round"]

_VERBS = ("write", "write", "paged", "scatter")
_WATCH = 2.0  # seconds that memory is watched after it was deregistered
_ASK = 0.7


@dataclass(slots=True)
class Round:
    """One use of a slot by one peer."""

    number: int
    peer: Peer
    shape: Shape
    imm: int
    slot: Slot | None  # None: memory of its own, deregistered at the end
    begin: float
    group: int | None = None  # number of the sender's scatter or barrier
    entry: Entry | None = None
    memory: Any = None
    handle: Any = None
    unsure: bool = False  # the expectation failed: the sender may still write
    confirmed: bool = False  # the sender says that it writes no more
    asked: float = 0.0


class Receiver:
    """All rounds that this engine receives."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.rounds: dict[int, Round] = {}
        self.verified = self.failed = self.payload = 0
        self.untidy: set[int] = set()  # immediates of groups whose last round failed: late counts are not surplus
        self._last = 0
        self._removals: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._watched: list[tuple[float, Round]] = []
        life.handlers |= {"failed": self.on_quiet, "confirm": self.on_quiet, "open": self.on_open}
        self._janitor = threading.Thread(target=self._deregister, name="janitor", daemon=True)
        self._janitor.start()

    # ---- begin

    def begin(self, peer: Peer) -> bool:
        """Invite `peer` into a free slot. False: all are in use."""
        life = self.life
        own = life.rng.random() < 0.1
        free = [slot for slot in life.slots[peer.id] if slot.busy is None]
        if not free and not own:
            return False
        slot = None if own else life.rng.choice(free)
        shape = Shape.draw(life.rng, life.rng.choice(_VERBS))
        made = self._make(peer, shape, life.engine.alloc_imm(), slot)
        fields: dict[str, Any] = {"r": made.number, "imm": made.imm, "shape": shape.to_list()}
        if own:
            made.memory = life.engine.empty(SLOT) if life.rng.random() < 0.5 else bytearray(SLOT)
            memoryview(made.memory)[:] = GUARDS
            made.handle, desc = life.engine.reg_mr(made.memory)
            fields["desc"] = base64.b64encode(desc.to_bytes()).decode()
        else:
            assert slot is not None
            fields["at"] = [slot.region, slot.offset]
        self._expect(made, shape.parts)

        def sent(_operation: Any, error: BaseException | None) -> None:
            if error is not None:
                self._give_up(made)

        life.tell(peer, "invite", sent, **fields)
        return True

    def _make(self, peer: Peer, shape: Shape, imm: int, slot: Slot | None, group: int | None = None) -> Round:
        self._last += 1
        made = Round(self._last, peer, shape, imm, slot, time.monotonic(), group)
        self.rounds[made.number] = made
        if slot is not None:
            if self.life.view(slot) != GUARDS:
                self._late(slot.last, f"slot of {peer.id}")
                self.life.view(slot)[:] = GUARDS
            slot.busy = made
        return made

    def _expect(self, made: Round, count: int) -> None:
        timeout = self.life.rng.uniform(2.0, 5.0)
        addr = made.peer.addr
        made.entry = self.life.ledger.submit(
            "expect", [addr], timeout,
            lambda done: self.life.engine.expect_imm_count(made.imm, count, done, timeout=timeout, peers=[addr]),
            partial(self._expected, made),
        )  # fmt: skip

    def on_open(self, peer: Peer, fields: dict[str, Any]) -> None:
        """A sender announces a scatter or barrier: make its slot ready, or say that it is not."""
        life, slot, imm = self.life, self.life.group_slots[peer.id], fields["imm"]
        ready = slot.busy is None
        if ready:
            count = life.engine.imm_count(imm)
            if count and imm not in self.untidy:
                life.report("break", what="an immediate came too often", detail=f"group {imm:#x} of {peer.id}: {count}")
            self._drain(imm)
            made = self._make(peer, Shape.from_list(fields["shape"]), imm, slot, fields["g"])
            self.untidy.discard(imm)
            self._expect(made, 1)
            life.tell(peer, "ready", g=fields["g"], r=made.number, ok=True, at=slot.offset)
        else:
            life.tell(peer, "ready", g=fields["g"], r=0, ok=False, at=0)

    def _drain(self, imm: int) -> None:
        count = self.life.engine.imm_count(imm)
        if count:
            self.life.ledger.submit(
                "drain", [], 1.0, lambda done: self.life.engine.expect_imm_count(imm, count, done, timeout=1.0)
            )

    # ---- end

    def _expected(self, made: Round, _operation: Any, error: BaseException | None) -> None:
        with self.life.lock:
            if self.life.ended:
                return
            if error is None:
                self._verify(made)
                self._take_back(made, surplus_is_wrong=True)
                return
            self.failed += 1
            if made.group is not None:
                self.untidy.add(made.imm)
            made.unsure = True
            if made.confirmed or made.slot is None:
                self._take_back(made)
            else:
                self._ask(made, time.monotonic())

    def _give_up(self, made: Round) -> None:
        operation = made.entry.operation if made.entry is not None else None
        if operation is not None:
            operation.cancel()

    def _verify(self, made: Round) -> None:
        seen = bytes(self.life.view(made.slot) if made.slot is not None else memoryview(made.memory))
        if seen != made.shape.image(len(seen)):
            self.life.report(
                "break",
                what="the payload was not right when the expectation fired",
                detail=f"from {made.peer.id}.{made.peer.inc}: {made.shape.first_difference(seen)}",
            )
        self.verified += 1
        self.payload += made.shape.length * made.shape.parts
        made.peer.ok_in = time.monotonic()

    def _ask(self, made: Round, now: float) -> None:
        made.asked = now
        self.life.tell(made.peer, "cancel", r=made.number, g=made.group)

    def on_quiet(self, _peer: Peer, fields: dict[str, Any]) -> None:
        """The sender's transfer has ended badly, or it will not begin: it writes no more (C7)."""
        made = self.rounds.get(fields["r"])
        if made is None:
            return
        made.confirmed = True
        if made.unsure:
            self._take_back(made)
        else:
            self._give_up(made)

    def _take_back(self, made: Round, surplus_is_wrong: bool = False) -> None:
        """The memory is ours again; from here on nobody may write there."""
        if self.rounds.pop(made.number, None) is None:
            return
        life = self.life
        try:
            surplus = life.engine.imm_count(made.imm) if made.group is not None else life.engine.free_imm(made.imm)
        except EngineClosed:
            return
        if surplus and surplus_is_wrong:
            life.report("break", what="an immediate came too often", detail=f"{surplus} more than {made.shape}")
        if made.slot is None:
            self._removals.put(made)
            return
        life.view(made.slot)[:] = GUARDS
        made.slot.last = self._who(made)
        made.slot.busy = None

    def _who(self, made: Round) -> str:
        how = "complete" if not made.unsure else "confirmed" if made.confirmed else "the sender is gone"
        age = time.monotonic() - made.begin
        return f"{made.peer.id}.{made.peer.inc} ({how}, {made.shape.verb}, {age:.2f} s long, path {self.life.path})"

    def _late(self, last: str, where: str) -> None:
        self.life.report(
            "break", what="a write landed in memory that had been taken back", detail=f"{where}, last used by {last}"
        )

    # ---- memory that is deregistered, on a thread of its own: it may take two heartbeats

    def _deregister(self) -> None:
        while (made := self._removals.get()) is not None:
            try:
                self.life.engine.dereg_mr(made.handle)
            except FabricError as error:
                if not self.life.ledger.closing:
                    self.life.report("break", what="memory could not be deregistered", detail=repr(error))
                continue
            memoryview(made.memory)[:] = GUARDS
            with self.life.lock:
                self._watched.append((time.monotonic(), made))

    def tick(self, now: float) -> None:
        """Ask again where no answer came; look at what was deregistered."""
        for made in list(self.rounds.values()):
            if not made.unsure:
                continue
            if made.peer.gone:
                self._take_back(made)
            elif now - made.asked > _ASK:
                self._ask(made, now)
        while self._watched and now - self._watched[0][0] > _WATCH:
            _, made = self._watched.pop(0)
            if memoryview(made.memory) != GUARDS:
                # a sender that was stopped in the middle of a copy may finish it: the supervisor knows
                self.life.report(
                    "suspect",
                    what="a write landed in memory that had been deregistered",
                    id=made.peer.id, since=made.begin, until=now, detail=self._who(made),
                )  # fmt: skip

    def peer_gone(self, peer: Peer) -> None:
        """Its process or engine is no more: what it left half done is quiet."""
        for made in list(self.rounds.values()):
            if made.peer is peer and made.unsure:
                self._take_back(made)

    def idle(self) -> bool:
        return not self.rounds

    def stop(self) -> None:
        """The janitor ends."""
        self._removals.put(None)
        self._janitor.join(10)
