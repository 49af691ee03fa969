"""Does a peer that hangs or died slow down the others (R5, C8)? The latency of writes to a good peer, beside a bad one.

    python tools/bench/isolation.py --rounds 9

Three processes over `local`. This one writes 64 bytes with an immediate to the good peer, one after the other, and
keeps a queue of writes to the other peer. Windows alternate: the other peer serves, stands still (SIGSTOP), or is dead
(SIGKILL). Printed: p50 and p99 of submit to done for the good peer, medians over the rounds with their spread, the
ratio to "serves", and how soon the loss was named. No exit code depends on a time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

from fabric_core import FabricError, MrDesc, Transfer, TransferEngine

HEARTBEAT = 0.25
STATES = ("serves", "stands still", "is dead")


def serve(name: str) -> None:
    """A peer: one region, and whatever arrives there is welcome."""
    with TransferEngine.open("cpu", "local", name=name, heartbeat=HEARTBEAT) as engine:
        _handle, desc = engine.reg_mr(engine.empty(1 << 20))
        print(json.dumps({"desc": desc.to_bytes().hex(), "imm": engine.alloc_imm()}), flush=True)
        sys.stdin.read()


class Peer:
    """Its process, and how to write to it."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, "--serve", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        self.desc, self.imm = MrDesc.from_bytes(bytes.fromhex(told["desc"])), int(told["imm"])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def window(engine: TransferEngine, handle: Any, good: Peer, bad: Peer, seconds: float) -> dict[str, float]:
    """Measure one window: (p50, p99) of the good peer in us, while the other's queue is kept at 64 writes."""
    waiting: list[Transfer] = []
    took: list[int] = []
    lost_after = 0.0
    begun = time.monotonic()
    while time.monotonic() < begun + seconds:
        waiting = [t for t in waiting if not t.done]
        try:
            while len(waiting) < 64 and not lost_after:
                waiting.append(engine.submit_single_write(4096, bad.imm, (handle, 0), (bad.desc, 0), None))
        except FabricError:
            lost_after = time.monotonic() - begun
        for _ in range(50):
            start = time.perf_counter_ns()
            transfer = engine.submit_single_write(64, good.imm, (handle, 0), (good.desc, 0), None)
            while not transfer.done:
                pass
            took.append(time.perf_counter_ns() - start)
        if not lost_after and any(t.done and t.exception() is not None for t in waiting):
            lost_after = time.monotonic() - begun
    took.sort()
    return {
        "p50": took[len(took) // 2] / 1e3,
        "p99": took[len(took) * 99 // 100] / 1e3,
        "lost_after": lost_after,
        "writes": len(took),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one window")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    rows: dict[str, list[dict[str, float]]] = {state: [] for state in STATES}
    with TransferEngine.open("cpu", "local", heartbeat=HEARTBEAT) as engine:
        handle, _ = engine.reg_mr(engine.empty(1 << 20))
        good = Peer(f"good-{os.getpid()}")
        for number in range(args.rounds):
            for state in STATES:
                bad = Peer(f"bad-{os.getpid()}-{number}-{STATES.index(state)}")
                window(engine, handle, good, bad, 0.1)  # first contact, caches
                if state != "serves":
                    bad.process.send_signal(signal.SIGSTOP if state == "stands still" else signal.SIGKILL)
                rows[state].append(window(engine, handle, good, bad, args.seconds))
                bad.end()
        good.end()
    base = {key: statistics.median(row[key] for row in rows["serves"]) for key in ("p50", "p99")}
    print(
        f"{platform.node()}, {os.cpu_count()} CPUs, heartbeat {HEARTBEAT} s, {args.rounds} rounds of {args.seconds} s"
    )
    for state in STATES:
        text = []
        for key in ("p50", "p99"):
            found = sorted(row[key] for row in rows[state])
            middle = statistics.median(found)
            text.append(f"{key} {middle:7.2f} us ({found[0]:.2f} .. {found[-1]:.2f}), x {middle / base[key]:.2f}")
        named = [row["lost_after"] for row in rows[state] if row["lost_after"]]
        if named:
            text.append(f"loss named after {min(named):.3f} .. {max(named):.3f} s ({len(named)} of {args.rounds})")
        print(f"the other peer {state:13}: {'; '.join(text)}")


if __name__ == "__main__":
    main()
