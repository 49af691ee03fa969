"""One engine from open to close: its memory, whom it knows, and the messages that pass."""

from __future__ import annotations

import base64
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chaos.book import BOOK, BOOK_BYTES, GUARD, SLOT
from chaos.ledger import Ledger
from chaos.plan import WorkerOptions
from fabric_core import EngineClosed, FabricError, MrDesc, NetAddr, TransferEngine

Then = Callable[[Any, BaseException | None], None]
__all__ = ["GROUP_IMMS", "GUARDS", "Life", "Peer", "Slot"]

GUARDS = bytes([GUARD]) * SLOT
GROUP_IMMS = 128  #: immediates of scatters and barriers per sender: the same numbers in every process
PING = 64
_MESSAGE = 1024
_SEEN = 4096


@dataclass(slots=True)
class Peer:
    """One incarnation of another process."""

    id: int
    inc: int
    addr: NetAddr
    descs: list[MrDesc]
    gone: bool = False  # its process is dead, or its engine closed: it writes no more
    ok_out: float = 0.0  # when a write to it was last seen to work
    ok_in: float = 0.0  # when a round of it was last verified
    pinging: bool = False
    pinged: float = 0.0


@dataclass(slots=True)
class Slot:
    """A place that one peer is invited to write to."""

    region: int
    offset: int
    busy: Any = None
    last: str = "nobody"  # who wrote there before, for reports


@dataclass
class Life:
    """An open engine with everything that hangs on it. `lock` guards all bookkeeping; close() is called without it."""

    options: WorkerOptions
    inc: int
    report: Callable[..., None]
    ledger: Ledger
    rng: random.Random
    lock: threading.RLock = field(default_factory=threading.RLock)
    ended: bool = False
    peers: dict[int, Peer] = field(default_factory=dict)
    early: dict[tuple[int, int], list[dict[str, Any]]] = field(default_factory=dict)
    handlers: dict[str, Callable[[Peer, dict[str, Any]], None]] = field(default_factory=dict)
    pings: list[tuple[float, int, float]] = field(default_factory=list)
    _seen: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    _last: int = 0

    def open(self) -> None:
        """Open the engine, register memory, post receives."""
        o = self.options
        extra: dict[str, Any] = {"faults": o.faults} if o.faults else {}
        self.path = self.rng.choice(("auto", "auto", "cma", "bounce"))
        self.engine = TransferEngine.open(
            backend="local", nics=o.nics, name=o.name, heartbeat=o.heartbeat, connect_timeout=o.connect_timeout,
            timeout=5.0, local_dir=o.directory, local_path=self.path,
            local_shuffle=self.rng.getrandbits(32), **extra,
        )  # fmt: skip
        self.engine.on_peer_lost = lambda error: self.report(
            "lost", inc=self.inc, peer=error.peer, code=error.code, at=time.monotonic()
        )
        self.engine.on_error = self._on_error
        self.group_imms = [self.engine.alloc_imm() for _ in range(GROUP_IMMS * o.processes)]
        per = (3, 2)  # slots of each peer in shared memory (the last is for scatters), and on the heap
        self.regions: list[Any] = [
            self.engine.empty(o.processes * (per[0] * SLOT + PING)),
            bytearray(o.processes * per[1] * SLOT),
        ]
        self.views = [memoryview(region) for region in self.regions]
        self.handles, self.descs = map(list, zip(*map(self.engine.reg_mr, self.regions), strict=True))
        for view in self.views:
            view[:] = bytes([GUARD]) * len(view)
        self.pages = bytearray(BOOK)
        self.book, _ = self.engine.reg_mr(self.pages, write=False)
        self.slots = {
            peer: [Slot(r, (peer * n + k) * SLOT) for r, n in ((0, 2), (1, 2)) for k in range(n)]
            for peer in range(o.processes)
        }
        first = o.processes * 2 * SLOT
        self.group_slots = [Slot(0, first + peer * SLOT) for peer in range(o.processes)]
        self.ping_at = o.processes * 3 * SLOT
        self.pool = self.engine.submit_recvs(_MESSAGE, 64, self._message)

    def card(self) -> dict[str, Any]:
        """What peers must know of us."""
        return {
            "id": self.options.number, "inc": self.inc, "addr": str(self.engine.address),
            "descs": [base64.b64encode(desc.to_bytes()).decode() for desc in self.descs],
        }  # fmt: skip

    def meet(self, card: dict[str, Any]) -> None:
        """A peer's new incarnation; what it sent before we heard of it is handled now."""
        descs = [MrDesc.from_bytes(base64.b64decode(desc)) for desc in card["descs"]]
        peer = Peer(card["id"], card["inc"], NetAddr.parse(card["addr"]), descs)
        with self.lock:
            self.peers[peer.id] = peer
            waiting = self.early.pop((peer.id, peer.inc), [])
            for key in [key for key in (*self.early, *self._seen) if key[0] == peer.id and key[1] < peer.inc]:
                self.early.pop(key, None)
                self._seen.pop(key, None)
            for fields in waiting:
                self._handle(peer, fields)

    def view(self, slot: Slot) -> memoryview:
        return self.views[slot.region][slot.offset : slot.offset + SLOT]

    def _on_error(self, error: BaseException) -> None:
        if not isinstance(error, FabricError):
            self.report("break", what="a callback raised", detail=repr(error))

    # ---- messages

    def tell(self, peer: Peer, verb: str, then: Then | None = None, **fields: Any) -> None:
        """Send a message; it may fail like everything else."""
        with self.lock:
            if self.ended or peer.gone:
                return
            self._last += 1
            at, pad = self.rng.randrange(BOOK_BYTES - 256), self.rng.randrange(200)
            fields |= {
                "m": verb, "s": self.options.number, "i": self.inc, "q": self._last,
                "b": [at, BOOK[at : at + pad].hex()],
            }  # fmt: skip
            message = json.dumps(fields, separators=(",", ":")).encode()
            timeout = self.rng.uniform(1.5, 4.0)
            try:
                self.ledger.submit(
                    "send", [peer.addr], timeout,
                    lambda done: self.engine.submit_send(peer.addr, message, done, timeout=timeout), then,
                )  # fmt: skip
            except EngineClosed:
                if not self.ledger.closing:
                    raise

    def _message(self, message: bytes) -> None:
        fields = json.loads(message)
        at, pad = fields["b"]
        if bytes.fromhex(pad) != BOOK[at : at + len(pad) // 2]:
            self.report("break", what="a message was damaged", detail=message.decode(errors="replace"))
        with self.lock:
            if self.ended:
                return
            key = (fields["s"], fields["i"])
            seen = self._seen.setdefault(key, set())
            if fields["q"] in seen:
                self.report("break", what="a message came twice", detail=f"{fields['m']} {fields['q']} of {key}")
            seen.add(fields["q"])
            if len(seen) > _SEEN:
                least = max(seen) - _SEEN // 2
                self._seen[key] = {q for q in seen if q >= least}
            peer = self.peers.get(key[0])
            if peer is not None and peer.inc == key[1]:
                self._handle(peer, fields)
            elif peer is None or peer.inc < key[1]:
                waiting = self.early.setdefault(key, [])
                if len(waiting) < 64:
                    waiting.append(fields)

    def _handle(self, peer: Peer, fields: dict[str, Any]) -> None:
        if not peer.gone:
            self.handlers[fields["m"]](peer, fields)

    # ---- what is measured

    def ping(self, peer: Peer, now: float) -> None:
        """A small silent write: its time is what R5 speaks of, its success says that the peer can be reached."""
        peer.pinging, peer.pinged = True, now
        where = (peer.descs[0], self.ping_at + PING * self.options.number)

        def ended(_operation: Any, error: BaseException | None) -> None:
            with self.lock:
                peer.pinging = False
                if error is None:
                    peer.ok_out = time.monotonic()
                    if len(self.pings) < 2000:
                        self.pings.append((now, peer.id, peer.ok_out - now))

        self.ledger.submit(
            "ping", [peer.addr], 2.0,
            lambda done: self.engine.submit_single_write(8, None, (self.book, 0), where, done, timeout=2.0), ended,
        )  # fmt: skip
