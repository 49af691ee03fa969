"""Measure fabric, its peers and the machine's limits in rounds, and report.

    python tools/peers/run.py --rounds 5 --out FILE      FILE gets a JSON line per figure, FILE.md the report
    python tools/peers/run.py --report FILE              only the report

A peer takes part if its interpreter is named: BENCH_PY_NIXL, BENCH_PY_UCXX, BENCH_PY_MPI, BENCH_PY_MOONCAKE. fabric
runs with BENCH_PY_FABRIC, or this one. Every second round goes backwards. Exit status 1: something failed, or data were
wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import render

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    variable: str
    script: str
    arguments: tuple[str, ...] = ()

    @property
    def interpreter(self) -> str | None:
        return os.environ.get(self.variable) or (sys.executable if self.variable == "BENCH_PY_FABRIC" else None)


#: How the two processes are joined -> what makes everybody use that. Mooncake has nothing but TCP without a NIC.
TRANSPORTS = {
    "host": {},
    "tcp": {"FABRIC_BACKEND": "efa", "UCX_TLS": "tcp"},
}
PEERS = (
    Peer("limits", "BENCH_PY_FABRIC", "limits.py"),
    Peer("fabric", "BENCH_PY_FABRIC", "fabric_adapter.py", ("--variant", "engine")),
    Peer("nixl", "BENCH_PY_NIXL", "nixl_adapter.py"),
    Peer("fabric-user", "BENCH_PY_FABRIC", "fabric_adapter.py", ("--variant", "user")),
    Peer("ucxx", "BENCH_PY_UCXX", "ucxx_adapter.py"),
    Peer("mpi", "BENCH_PY_MPI", "mpi_adapter.py"),
    Peer("mooncake", "BENCH_PY_MOONCAKE", "mooncake_adapter.py"),
)
#: With --transport tcp. Whose memory it is makes no difference there.
TCP_PEERS = (
    Peer("limits", "BENCH_PY_FABRIC", "limits_tcp.py"),
    *(peer for peer in PEERS if peer.name in ("fabric", "nixl", "ucxx", "mooncake")),
)


def busy_seconds() -> float:
    """Return what all processors together have worked since boot."""
    user, nice, system, _idle, _iowait, irq, softirq, stolen, *_ = (
        int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Return what our children worked, those that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def wait_for_quiet(processors: float, patience: float) -> float:
    """Wait until others use no more than so many processors; return what they use."""
    deadline = time.monotonic() + patience
    while True:
        begin, before = time.monotonic(), busy_seconds()
        time.sleep(0.5)
        used = (busy_seconds() - before) / (time.monotonic() - begin)
        if used <= processors or time.monotonic() > deadline:
            return used


def measure(peer: Peer, extra: list[str], patience: float, environ: dict[str, str]) -> list[dict[str, Any]]:
    """Run one peer in a session of its own; return its figures, each with how busy others were meanwhile."""
    begin, busy, own = time.monotonic(), busy_seconds(), own_seconds()
    command = [str(peer.interpreter), str(_HERE / peer.script), *peer.arguments, *extra]
    process = subprocess.Popen(
        command,
        env=os.environ | environ | {"BENCH_FENCE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    why = ""
    try:
        output, complaints = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        why = f"not done after {patience:g} s"
        output, complaints = _stop(process)
    except BaseException:
        _stop(process)
        raise
    wall = time.monotonic() - begin
    others = max(0.0, busy_seconds() - busy - (own_seconds() - own)) / wall
    figures = [json.loads(line) for line in output.splitlines() if line.startswith('{"peer"')]
    if process.returncode and not any("error" in figure for figure in figures):
        why = why or f"exit status {process.returncode}: {complaints.strip()[-300:]}"
        figures.append({"peer": peer.name, "op": "run", "size": 0, "error": why})
    for figure in figures:
        figure["others"] = round(others, 2)
    return figures


def _stop(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End the process and its group, first by asking: mpiexec then ends its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            return process.communicate(timeout=5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    return process.communicate()


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "machine": next(models, platform.machine()),
        "processors": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("peers.jsonl"))
    parser.add_argument("--only", default="", help="comma list of: " + ", ".join(peer.name for peer in PEERS))
    parser.add_argument("--transport", choices=tuple(TRANSPORTS), default="host", help="tcp: as between two hosts")
    parser.add_argument("--quick", action="store_true", help="does everything run and verify; no figures to quote")
    parser.add_argument("--ops", help="comma list of: write, paged, ping, submit, register")
    parser.add_argument("--sizes", help="comma list of bytes: only writes of these")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for one peer in one round")
    parser.add_argument("--quiet", type=float, default=0.3, help="begin when others use no more processors than this")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for that; then begin anyway")
    parser.add_argument("--max-others", type=float, help="report: leave out what shared more processors than this")
    parser.add_argument("--report", type=Path, metavar="FILE", help="measure nothing, report from FILE")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.report:
        print(render(options.report, options.max_others))
        return 0
    only = set(filter(None, options.only.split(",")))
    peers = PEERS if options.transport == "host" else TCP_PEERS
    if unknown := only - {peer.name for peer in peers}:
        sys.exit(f"--only: unknown: {', '.join(sorted(unknown))}")
    chosen = [peer for peer in peers if not only or peer.name in only]
    for peer in chosen:
        if not peer.interpreter:
            print(f"{peer.name}: left out, {peer.variable} is not set", file=sys.stderr)
    extra = ["--quick"] * options.quick + (["--ops", options.ops] if options.ops else [])
    extra += ["--sizes", options.sizes] if options.sizes else []
    bad = False
    with options.out.open("w", buffering=1) as out:
        about = {"rounds": options.rounds, "quick": options.quick, "transport": options.transport}
        print(json.dumps(machine() | about), file=out)
        for number in range(options.rounds):
            for peer in [peer for peer in chosen if peer.interpreter][:: -1 if number % 2 else 1]:
                before = wait_for_quiet(options.quiet, 0 if options.quick else options.patience)
                begin = time.monotonic()
                figures = measure(peer, extra, options.timeout, TRANSPORTS[options.transport])
                for figure in figures:
                    print(json.dumps(figure | {"round": number}), file=out)
                wrong = [f for f in figures if "error" in f or f.get("verified") is False]
                bad = bad or bool(wrong)
                during = figures[0]["others"] if figures else 0
                print(
                    f"round {number + 1} {peer.name}: {len(figures)} figures in {time.monotonic() - begin:.1f} s, "
                    f"others used {before:.2f} processors before and {during:.2f} meanwhile",
                    *(f"\n    {f['op']} {f['size']}: {f.get('error', 'WRONG DATA')}" for f in wrong),
                    file=sys.stderr,
                )
    text = render(options.out, options.max_others)
    options.out.with_name(options.out.name + ".md").write_text(text + "\n")
    print(text)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
