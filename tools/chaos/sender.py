"""The sending side of rounds: does what it is invited to, cancels when asked, and says when it is quiet."""

from __future__ import annotations

import base64
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from chaos.book import EDGE, Shape
from chaos.ledger import Entry
from chaos.life import GROUP_IMMS, Life, Peer
from fabric_core import EngineClosed, MrDesc, Pages, QueueFull, ScatterDst

__all__ = ["Sender"]

_PATIENCE = 0.5  # seconds that a scatter waits for its targets
Key = tuple[int, int, int]  # peer, incarnation, its round


@dataclass(slots=True)
class Group:
    """A scatter or barrier that gathers its targets."""

    number: int
    imm: int
    shape: Shape
    asked: list[Peer]
    begin: float
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    launched: bool = False
    targets: list[tuple[Peer, int]] = field(default_factory=list)  # with the round's number there


class Sender:
    """All transfers that this engine makes for others."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.transfers: dict[Key, Entry] = {}
        self.asked: set[Key] = set()  # rounds whose receiver wants to hear that they are over
        self.over: deque[Key] = deque(maxlen=4096)  # rounds that were cancelled before their invitation came
        self.groups: dict[int, Group] = {}
        self._last = 0
        life.handlers |= {"invite": self.on_invite, "cancel": self.on_cancel, "ready": self.on_ready}

    # ---- one receiver

    def on_invite(self, peer: Peer, fields: dict[str, Any]) -> None:
        """Write what the receiver asks for, where it says."""
        life, key = self.life, (peer.id, peer.inc, fields["r"])
        if key in self.over:
            life.tell(peer, "confirm", r=fields["r"])
            return
        shape = Shape.from_list(fields["shape"])
        if "desc" in fields:
            desc, base = MrDesc.from_bytes(base64.b64decode(fields["desc"])), EDGE
        else:
            region, offset = fields["at"]
            desc, base = peer.descs[region], offset + EDGE
        timeout = life.rng.uniform(1.0, 4.0)

        def start(done: Any) -> Any:
            engine, book, imm = life.engine, life.book, fields["imm"]
            if shape.verb == "write":
                return engine.submit_single_write(
                    shape.length, imm, (book, shape.page), (desc, base), done, timeout=timeout
                )
            if shape.verb == "paged":
                source = Pages(range(shape.parts), shape.length, shape.page)
                target = Pages(shape.order(), shape.stride, base)
                return engine.submit_paged_writes(
                    shape.length, imm, (book, source), (desc, target), done, timeout=timeout
                )
            parts = [
                ScatterDst(desc, shape.length, shape.page + k * shape.length, base + place * shape.stride)
                for k, place in enumerate(shape.order())
            ]
            return engine.submit_scatter(None, done, imm, book, parts, timeout=timeout)

        def ended(_operation: Any, error: BaseException | None) -> None:
            with life.lock:
                self.transfers.pop(key, None)
                wanted = key in self.asked
                self.asked.discard(key)
                if error is not None or wanted:
                    life.tell(peer, "failed", r=fields["r"])

        self._submit(shape.verb, [peer], timeout, start, ended, key)

    def _submit(self, kind: str, peers: list[Peer], timeout: float, start: Any, ended: Any, key: Key | None) -> None:
        try:
            entry = self.life.ledger.submit(kind, [peer.addr for peer in peers], timeout, start, ended)
        except QueueFull as error:
            ended(None, error)
        except EngineClosed:
            if not self.life.ledger.closing:
                raise
        else:
            if key is not None and not entry.calls:
                self.transfers[key] = entry

    def on_cancel(self, peer: Peer, fields: dict[str, Any]) -> None:
        """The receiver wants its memory back."""
        key = (peer.id, peer.inc, fields["r"])
        if fields["g"] is not None:
            group = self.groups.get(fields["g"])
            if group is not None and not group.launched:
                group.asked = [one for one in group.asked if one is not peer]
                group.answers.pop(peer.id, None)
        entry = self.transfers.get(key)
        if entry is not None:
            self.asked.add(key)
            operation = entry.operation
            if operation is not None:  # else it has just ended, and says so next
                operation.cancel()
            return
        self.over.append(key)
        self.life.tell(peer, "confirm", r=fields["r"])

    # ---- many receivers

    def begin_group(self, now: float) -> None:
        """Announce a scatter or barrier to some peers."""
        life = self.life
        up = [peer for peer in life.peers.values() if not peer.gone]
        if len(up) < 2:
            return
        chosen = life.rng.sample(up, life.rng.randint(2, len(up)))
        shape = Shape.draw(life.rng, "write", most=16 << 10)
        if life.rng.random() < 0.4:
            shape = Shape("barrier", 0, 1, 0, 0, 0)
        self._last += 1
        imm = life.group_imms[life.options.number * GROUP_IMMS + (self._last + life.inc * 37) % GROUP_IMMS]
        group = self.groups[self._last] = Group(self._last, imm, shape, chosen, now)
        for peer in chosen:
            life.tell(peer, "open", g=group.number, imm=imm, shape=shape.to_list())

    def on_ready(self, peer: Peer, fields: dict[str, Any]) -> None:
        """A target's answer; too late is answered with: nothing will come."""
        group = self.groups.get(fields["g"])
        if group is None or group.launched or peer not in group.asked:
            if fields["ok"]:
                self.life.tell(peer, "failed", r=fields["r"])
            return
        group.answers[peer.id] = fields
        if len(group.answers) == len(group.asked):
            self._launch(group)

    def _launch(self, group: Group) -> None:
        life = self.life
        group.launched = True
        self.groups.pop(group.number)
        ready = [(peer, group.answers[peer.id]) for peer in group.asked if group.answers.get(peer.id, {}).get("ok")]
        if not ready:
            return
        timeout = life.rng.uniform(1.0, 4.0)
        keys = [(peer.id, peer.inc, fields["r"]) for peer, fields in ready]

        def start(done: Any) -> Any:
            if group.shape.verb == "barrier":
                descs = [peer.descs[0] for peer, _ in ready]
                return life.engine.submit_barrier(None, done, group.imm, descs, timeout=timeout)
            parts = [
                ScatterDst(peer.descs[0], group.shape.length, group.shape.page, fields["at"] + EDGE)
                for peer, fields in ready
            ]
            return life.engine.submit_scatter(None, done, group.imm, life.book, parts, timeout=timeout)

        def ended(_operation: Any, error: BaseException | None) -> None:
            with life.lock:
                for key, (peer, fields) in zip(keys, ready, strict=True):
                    self.transfers.pop(key, None)
                    wanted = key in self.asked
                    self.asked.discard(key)
                    if error is not None or wanted:
                        life.tell(peer, "failed", r=fields["r"])

        kind = "barrier" if group.shape.verb == "barrier" else "scatter to many"
        try:
            entry = life.ledger.submit(kind, [peer.addr for peer, _ in ready], timeout, start, ended)
        except QueueFull as error:
            ended(None, error)
            return
        except EngineClosed:
            if not life.ledger.closing:
                raise
            return
        if not entry.calls:
            for key in keys:
                self.transfers[key] = entry

    def tick(self, now: float) -> None:
        """Scatters that waited long enough go to those who answered."""
        for group in list(self.groups.values()):
            if now - group.begin > _PATIENCE:
                self._launch(group)

    def idle(self) -> bool:
        return not self.transfers and not self.groups
