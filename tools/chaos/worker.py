"""One of the processes: an engine under mixed load, driven by lines on stdin, telling what it sees on stdout.

Lines in: {"do": "peer" | "gone" | "reopen" | "drain", ...}. Lines out: {"e": "open" | "lost" | "break" | "suspect" |
"status" | "closed" | "final", ...}. The process dies with its supervisor.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import select
import signal
import threading
import time
import traceback
from collections import Counter
from typing import Any

from chaos.ledger import Ledger, Stalls
from chaos.life import Life
from chaos.plan import WorkerOptions
from chaos.planted import plant
from chaos.receiver import Receiver
from chaos.sender import Sender
from fabric_core import EngineClosed, QueueFull
from fabric_core.faults import Plan

__all__ = ["Worker", "main"]

_TICK = 0.02
_STATUS = 0.5
_PING = 0.1
_PR_SET_PDEATHSIG = 1
_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _pad: 0)


def die_with(parent: int) -> None:
    """SIGKILL when the supervisor ends; at once if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def footprint() -> dict[str, Any]:
    """What this process holds of the system; what malloc keeps of what was freed is given back first."""
    _trim(0)
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    with open("/proc/self/maps") as file:
        shared = sum("memfd:" in line for line in file)
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0].partition(" (")[0])
        except OSError:  # the listing's own
            continue
    return {
        "fds": len(names),
        "kinds": Counter(names),
        "threads": int(lines["Threads"]),
        "anon_kib": int(lines["RssAnon"].split()[0]),
        "maps": shared,
    }


def engine_threads() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except OSError:
            continue
    return [name for name in names if name.startswith("fabric")]


class Worker:
    """The process."""

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # whatever prints must not get between the lines
        self._say_lock = threading.Lock()
        self.stalls = Stalls()
        self.ledger = Ledger(self.report, self.stalls, options.slack)
        if options.faults:
            self.ledger.injected = Plan.parse(options.faults).fail_code
        self.cards: dict[int, dict[str, Any]] = {}
        self.breaks = 0
        self.draining = 0.0
        self._tokens = 0.0
        self._idle: dict[str, int] = {}  # descriptors and threads before the first engine
        self.totals: Counter[str] = Counter()

    def report(self, event: str, **fields: Any) -> None:
        """A line for the supervisor. From any thread."""
        if event == "break":
            self.breaks += 1
            if self.breaks > 50:
                return
        line = json.dumps({"e": event, "t": time.monotonic(), **fields}) + "\n"
        with self._say_lock:
            self._out.write(line)

    # ---- life

    def start(self, inc: int) -> None:
        o = self.options
        rng = random.Random(f"{o.seed} {o.number} {inc}")
        self.ledger.closing = False
        self.life = Life(o, inc, self.report, self.ledger, rng)
        self.life.open()
        self.receiver = Receiver(self.life)
        self.sender = Sender(self.life)
        for card in self.cards.values():
            self.life.meet(card)
        if o.plant:
            plant(self, o.plant)
        self.report("open", card=self.life.card(), path=self.life.path)

    def stop(self) -> None:
        """Close the engine as it is, with whatever is in flight; look at what is left."""
        life = self.life
        self.ledger.closing = True
        begin = time.monotonic()
        life.engine.close(5.0)
        took = time.monotonic() - begin
        with life.lock:
            life.ended = True
            still = {entry.kind: entry.number for entry in self.ledger.open.values()}
        self.receiver.stop()
        if still:
            self.report("break", what="operations were open after close()", detail=str(still))
            self.ledger.open.clear()
        self.totals += Counter(
            verified=self.receiver.verified, failed=self.receiver.failed, bytes=self.receiver.payload
        )
        stats = life.engine.stats()
        self.totals += Counter({name: stats[name] for name in ("submitted", "done", "failed", "cancelled", "wrs")})
        if stats["inflight"]:
            self.report("break", what="operations are in flight after close()", detail=str(stats["inflight"]))
        for view in life.views:  # after close() no NIC touches registered memory: look whether that is so
            view[:] = b"\x5a" * len(view)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            time.sleep(0.02)
        for view in life.views:
            if bytes(view) != b"\x5a" * len(view):
                self.report(
                    "suspect", what="a write landed after close()", id=None, since=begin, until=time.monotonic(),
                    detail=f"path {life.path}",
                )  # fmt: skip
        self.report("closed", inc=life.inc, took=took)

    def reopen(self, inc: int) -> None:
        self.stop()
        self._forget()
        left = footprint()
        more = left["fds"] - self._idle["fds"], left["threads"] - self._idle["threads"]
        if max(more) > 0 or engine_threads():
            detail = f"{more[0]} descriptors, {more[1]} threads more than before; {left['kinds']}, {engine_threads()}"
            self.report("break", what="a closed engine left something behind", detail=detail)
        self.start(inc)

    def _forget(self) -> None:
        del self.life, self.receiver, self.sender
        end = time.monotonic() + 5
        while time.monotonic() < end:  # the engine goes with its last reference; a callback may still hold one
            gc.collect()
            if footprint()["fds"] <= self._idle["fds"] and not engine_threads():
                return
            time.sleep(0.02)

    # ---- the loop

    def run(self) -> int:
        footprint()
        self._idle = footprint()
        self.start(self.options.incarnation)
        unread, next_status = b"", 0.0
        os.set_blocking(0, False)
        while True:
            if select.select([0], [], [], _TICK)[0]:
                chunk = os.read(0, 1 << 16)
                if not chunk:
                    os._exit(1)  # no supervisor
                *lines, unread = (unread + chunk).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            now = time.monotonic()
            self._tick(now)
            if now >= next_status:
                next_status = now + _STATUS
                self._status(now)
            if self.draining and (self._settled() or now > self.draining):
                return self._finish()

    def _obey(self, order: dict[str, Any]) -> None:
        do = order["do"]
        if do == "peer":
            card = order["card"]
            if card["id"] != self.options.number:
                self.cards[card["id"]] = card
                self.life.meet(card)
        elif do == "gone":
            card = self.cards.get(order["id"])
            if card is not None and card["inc"] <= order["inc"]:
                del self.cards[order["id"]]
            with self.life.lock:
                peer = self.life.peers.get(order["id"])
                if peer is not None and peer.inc <= order["inc"]:
                    peer.gone = True
                    self.receiver.peer_gone(peer)
        elif do == "reopen":
            self.reopen(order["inc"])
        elif do == "drain":
            self.draining = time.monotonic() + order["within"]

    def _tick(self, now: float) -> None:
        life, rng = self.life, self.life.rng
        self.ledger.overdue()
        with life.lock:
            self.receiver.tick(now)
            self.sender.tick(now)
            if self.draining:
                return
            peers = [peer for peer in life.peers.values() if not peer.gone]
            self._tokens = min(self._tokens + self.options.rate * _TICK, 5.0)
            try:
                for peer in peers:
                    if not peer.pinging and now - peer.pinged > _PING:
                        life.ping(peer, now)
                while self._tokens >= 1 and peers:
                    self._tokens -= 1
                    if rng.random() < 0.15:
                        self.sender.begin_group(now)
                    else:
                        self.receiver.begin(rng.choice(peers))
            except QueueFull:
                self.totals["full"] += 1
            except EngineClosed:
                self.report("break", what="an engine closed by itself", detail=traceback.format_exc())

    def _status(self, now: float) -> None:
        life = self.life
        stats = life.engine.stats()
        states = {address: row["state"] for address, row in stats["peers"].items()}
        with life.lock:
            pings, life.pings = life.pings, []
            peers = [
                [peer.id, peer.inc, states.get(str(peer.addr), "unknown"), peer.ok_out, peer.ok_in]
                for peer in life.peers.values()
            ]
        with self.ledger.lock:
            pending = len(self.ledger.open)
        counts = self.totals + Counter(
            verified=self.receiver.verified, failed=self.receiver.failed, bytes=self.receiver.payload
        )
        self.report(
            "status", inc=life.inc, peers=peers, pings=[[round(t, 3), i, round(s, 6)] for t, i, s in pings],
            pending=pending, counts=counts, ends=self.ledger.ends, stalled=self.stalls.total, stray=stats["imm_stray"],
            stats={name: stats[name] for name in ("submitted", "done", "failed", "cancelled", "faults")},
            **footprint(),
        )  # fmt: skip

    def _settled(self) -> bool:
        with self.life.lock:
            return self.ledger.all_ended() and self.receiver.idle() and self.sender.idle()

    def _finish(self) -> int:
        """Everything has ended, or should have: the books are closed."""
        if not self._settled():
            with self.life.lock:
                rounds = [(r.peer.id, r.peer.inc, r.shape.verb, r.unsure) for r in self.receiver.rounds.values()]
                kinds = Counter(entry.kind for entry in self.ledger.open.values())
            self.report("break", what="not everything ended after the load had", detail=f"{kinds}, rounds {rounds}")
        self._status(time.monotonic())
        self.stop()
        self._forget()
        left = footprint()
        if left["fds"] > self._idle["fds"] or engine_threads():
            self.report(
                "break", what="a closed engine left something behind", detail=f"{left['kinds']}, {engine_threads()}"
            )
        self.report("final", totals=self.totals, ends=self.ledger.ends, breaks=self.breaks)
        return 0


def main(text: str) -> int:
    """Run as a process of the chaos."""
    options = WorkerOptions.from_json(text)
    die_with(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's
    worker = Worker(options)
    try:
        return worker.run()
    except Exception:
        worker.report("break", what="a process of the chaos raised", detail=traceback.format_exc())
        return 1
