"""fabric-ibverbs against perftest on the same two devices: alternating runs, medians, ratios.

    tools/rdma-guest/run_in_guest.py --timeout 1200 -- .venv/bin/python tools/bench/verbs.py      software RDMA
    python tools/bench/verbs.py --device mlx5_0 --peer-device mlx5_1 --gid 3                      real NICs of one node

Ours is `packages/fabric-ibverbs/tests/c/bench_verbs.c`: the whole engine and the backend, driven from C, because Python
in an emulated machine is 12 times slower than outside. `--build` compiles it (before the guest starts: a C compiler is
slow in there). perftest: ib_write_bw and ib_write_lat, without and with `--post_list 4`; of both the figure that the
sender sees is taken. ib_write_lat polls memory; ours waits for an immediate, that is for a completion, so ib_send_lat
is printed too, and `bare_ping.c`: the same write with an immediate over a bare queue pair. What a callback costs by
itself is measured in the same rounds. No exit code depends on a time.

With `run_in_guest.py --icount` rates and bandwidths count instructions, whatever else the host does. Latencies do not,
since both ends poll and there is one processor: bench_pair.c beside bench_verbs.c is for those.

On software RDMA the kernel is the NIC, and once it has fallen behind, ksoftirqd does its work and shares the processor
with whoever polls: half of it goes to looks that find nothing, of perftest or of us, and which of the two ways a run
goes is a matter of luck. `--background` gives both sides the scheduling class of background work (SCHED_IDLE), so that
the kernel's threads come first, as a NIC's processor would.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "tools" / "rdma-guest" / "build_programs.py"
BINARY = ROOT / "build" / "verbs" / "bench_verbs"
BARE = BINARY.with_name("bare_ping")
WRITE_LAT, CALLBACK = "latency 8 B, ib_write_lat, us", "a callback by itself, us"
SIZES = (65536, 1 << 20, 8 << 20)
DEADLINE = 120.0


class Ours:
    """Both processes of ours, for one setting of the chain."""

    def __init__(self, args: argparse.Namespace, chain: int) -> None:
        env = {**os.environ, "FABRIC_VERBS_CHAIN": str(chain)}

        def start(role: str, device: str) -> subprocess.Popen[str]:
            return subprocess.Popen(
                [str(BINARY), role, device, str(args.gid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
            )

        self.server, self.writer = start("serve", args.peer_device), start("write", args.device)
        self._pass_on(self.server, self.writer)
        self._pass_on(self.writer, self.server)

    @staticmethod
    def _pass_on(a: subprocess.Popen[str], b: subprocess.Popen[str]) -> None:
        assert a.stdout
        assert b.stdin
        b.stdin.write(a.stdout.readline())
        b.stdin.flush()

    def ask(self, verb: str, size: int, count: int) -> float:
        assert self.writer.stdin
        assert self.writer.stdout
        assert self.server.stdin
        if verb == "lat":  # only then does the other side poll
            self.server.stdin.write(f"{count}\n")
            self.server.stdin.flush()
        self.writer.stdin.write(f"{verb} {size} {count}\n")
        self.writer.stdin.flush()
        return float(self.writer.stdout.readline())

    def end(self) -> None:
        for process in (self.writer, self.server):
            process.kill()
            process.wait()


def perftest(args: argparse.Namespace, program: str, size: int, count: int, *more: str, column: int = 0) -> float:
    """Return one figure of perftest's line: by default MiB/s, or the typical latency in microseconds."""
    column = column or (3 if program.endswith("_bw") else 4)
    base = ["-x", str(args.gid), "-s", str(size), "-n", str(count), "-p", str(args.port), "-F", "-u", "18", *more]
    server = subprocess.Popen(
        [program, "-d", args.peer_device, *base], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + DEADLINE
        while True:
            command = [program, "-d", args.device, *base, args.address]
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
            rows = [line.split() for line in done.stdout.splitlines() if re.match(rf"\s*{size}\s", line)]
            if done.returncode == 0 and rows:
                break
            if time.monotonic() > end or server.poll() not in (None, 0):
                raise RuntimeError(f"{program}: {done.stdout[-500:]}{done.stderr[-500:]}")
            time.sleep(0.3)  # it does not listen yet
        server.wait(DEADLINE)
    finally:
        server.kill()
        server.wait()
    row = rows[0]  # of a bandwidth: bytes, iterations, peak, average, rate
    return float(row[column])


def bare_ping(args: argparse.Namespace, count: int) -> float:
    """Return the latency of a bare queue pair in microseconds."""
    command = [str(BARE), args.device, args.peer_device, str(args.gid), str(count)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE, check=True).stdout)


def message_rate(args: argparse.Namespace, size: int, count: int, *more: str) -> float:
    """Return perftest's million messages per second."""
    return perftest(args, "ib_write_bw", size, count, *more, column=4)


def alternate(
    rounds: int,
    pairs: dict[str, tuple[Callable[[], float], Callable[[], float]]],
    alone: dict[str, Callable[[], float]],
) -> dict[str, Any]:
    """Take each figure once a round, ours and theirs in turn; `alone` has none of theirs. Print and return medians."""
    figures: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in pairs}
    single: dict[str, list[float]] = {name: [] for name in alone}
    for _ in range(rounds):
        for name, (ours, theirs) in pairs.items():
            for values, measure in zip(figures[name], (ours, theirs), strict=True):
                values.append(measure())
            print(f"  {name}: {figures[name][0][-1]:.4g}, {figures[name][1][-1]:.4g}", flush=True)
        for name, measure in alone.items():
            single[name].append(measure())
            print(f"  {name}: {single[name][-1]:.4g}", flush=True)
    found: dict[str, Any] = {}
    for name, (ours_all, theirs_all) in figures.items():
        mine, other = statistics.median(ours_all), statistics.median(theirs_all)
        found[name] = {
            "ours": round(mine, 4),
            "other": round(other, 4),
            "ratio": round(mine / other, 3),
            "ours_all": [round(value, 4) for value in ours_all],
            "other_all": [round(value, 4) for value in theirs_all],
        }
        print(f"{name:44} ours {mine:10.4g}   other {other:10.4g}   ratio {mine / other:.3f}", flush=True)
    for name, values in single.items():
        found[name] = {"ours": round(statistics.median(values), 4), "ours_all": [round(value, 4) for value in values]}
        print(f"{name:44} ours {found[name]['ours']:10.4g}", flush=True)
    if WRITE_LAT in pairs and CALLBACK in alone:
        most = 1.15 * found[WRITE_LAT]["other"] + found[CALLBACK]["ours"]
        print(f"1.15 x ib_write_lat + a callback: {most:.4g} us; ours {found[WRITE_LAT]['ours']:.4g} us", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="fabric-ibverbs against perftest on the same two devices.")
    parser.add_argument("--device", default="rxe0", help="the writer's")
    parser.add_argument("--peer-device", default="rxe1")
    parser.add_argument("--address", default="127.0.0.1", help="where perftest's server listens (TCP)")
    parser.add_argument("--gid", type=int, default=1)
    parser.add_argument("--port", type=int, default=18515)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=32, help="moved per bandwidth figure")
    parser.add_argument("--messages", type=int, default=3000, help="per rate figure")
    parser.add_argument("--pings", type=int, default=500, help="per latency figure")
    parser.add_argument("--only", default="", metavar="REGEX", help="figures whose name it matches")
    parser.add_argument("--background", action="store_true", help="kernel threads come before whoever polls")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--build", action="store_true", help="compile the program, and stop")
    args = parser.parse_args()
    if args.build or not BINARY.exists():
        subprocess.run([sys.executable, str(BUILD)], check=True)
    if args.build:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.background:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # inherited by all that is started
    chains = {1: Ours(args, 1), 4: Ours(args, 4), 16: Ours(args, 16)}
    try:
        pairs: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {}
        for size in SIZES:
            count = max(5, args.megabytes * 1_000_000 // size)
            pairs[f"bandwidth {size >> 10} KiB, MiB/s"] = (
                partial(chains[4].ask, "bw", size, count),
                partial(perftest, args, "ib_write_bw", size, count),
            )
        for size in (64, 1024):
            for chain in (1, 4, 16):
                count = args.messages // 16 * 16
                # perftest asks for one completion per list, or with single posts for one in 16, as ours does
                options = ("--post_list", str(chain), "-Q", str(chain)) if chain > 1 else ("-Q", "16")
                pairs[f"rate {size} B, list {chain}, M/s"] = (
                    partial(chains[chain].ask, "rate", size, count),
                    partial(message_rate, args, size, count, *options),
                )
        latency = partial(chains[4].ask, "lat", 8, args.pings)
        for name in ("ib_write_lat", "ib_send_lat"):
            pairs[f"latency 8 B, {name}, us"] = (latency, partial(perftest, args, name, 8, args.pings))
        pairs["latency 8 B, bare write + immediate, us"] = (latency, partial(bare_ping, args, args.pings))
        pairs = {name: pair for name, pair in pairs.items() if re.search(args.only, name)}
        alone: dict[str, Callable[[], float]] = {}
        if WRITE_LAT in pairs:
            alone[CALLBACK] = partial(chains[4].ask, "call", 8, args.pings)
        found = alternate(args.rounds, pairs, alone)
    finally:
        for ours in chains.values():
            ours.end()
    if args.json:
        head = {"machine": platform.platform(), "rounds": args.rounds, "device": args.device, "command": sys.argv}
        Path(args.json).write_text(json.dumps({**head, "figures": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
