"""What the run says: a live line, a table, JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from typing import Any

from chaos.flat import Flat
from chaos.judge import Judge, quantile
from chaos.plan import Options

__all__ = ["final", "live"]

_last = [0.0]


def live(options: Options, judge: Judge, done: dict[str, int], slots: list[Any]) -> None:
    """One line on a terminal, twice a second."""
    now = time.monotonic()
    if not sys.stderr.isatty() or now - _last[0] < 0.5:
        return
    _last[0] = now
    rounds = sum(line["counts"].get("verified", 0) for line in judge.status.values())
    marks = "".join("." if s.trouble is None else s.trouble.kind[0].upper() for s in slots)
    print(
        f"\rseed {options.seed} [{marks}] kills {done['kill']} stops {done['stop']} reopens {done['reopen']} "
        f"rounds {rounds} losses {judge.counts['losses']} breaks {len(judge.breaks)} ",
        end="", file=sys.stderr, flush=True,
    )  # fmt: skip


def _spread(values: list[float], unit: float = 1.0) -> dict[str, float]:
    return {
        "count": len(values),
        **{name: round(quantile(values, share) * unit, 3) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1))},
    }


def final(
    options: Options, judge: Judge, flat: Flat, done: dict[str, int], finals: list[dict[str, Any]], begin: float
) -> int:
    """Print the table, write the JSON, return the exit status."""
    ends: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for line in finals:
        ends += Counter(line["ends"])
        totals += Counter(line["totals"])
    result = {
        "options": dataclasses.asdict(options),
        "seconds": round(time.monotonic() - begin, 1),
        "events": done,
        "operations": dict(sorted(ends.items())),
        "totals": dict(sorted(totals.items())),
        "counts": dict(judge.counts),
        "loss_named_after_s": {kind: _spread(values) for kind, values in judge.lost_after.items()},
        "reached_again_after_s": _spread(judge.met_after),
        "ping_ms": {
            "calm": _spread(judge.calm, 1e3), "others in trouble": _spread(judge.others, 1e3),
            "first 2 s of a kill or stop": _spread(judge.prompt, 1e3),
        },
        "flat": flat.rows,
        "breaks": judge.breaks,
    }  # fmt: skip
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    _table(result)
    again = f"python tools/chaos {options.arguments()}"
    for found in judge.breaks[:20]:
        print(f"BREAK process {found['who']}: {found['what']}\n      {found['detail']}")
    if judge.breaks:
        print(f"{len(judge.breaks)} breaks. Again: {again}")
        return 1
    print("nothing broke")
    return 0


def _table(result: dict[str, Any]) -> None:
    rows: list[tuple[str, str]] = [
        ("seed, seconds", f"{result['options']['seed']}, {result['seconds']}"),
        ("kills, stops, reopens", ", ".join(str(result["events"][k]) for k in ("kill", "stop", "reopen"))),
        ("rounds verified, failed", f"{result['totals'].get('verified', 0)}, {result['totals'].get('failed', 0)}"),
        ("bytes verified", f"{result['totals'].get('bytes', 0) / 1e6:.1f} MB"),
        ("operations ended", str(sum(n for k, n in result["operations"].items() if " " in k))),
    ]
    rows += [(f"  {kind}", str(n)) for kind, n in result["operations"].items()]
    for kind, spread in result["loss_named_after_s"].items():
        rows.append((f"loss named after a {kind}, s", _words(spread)))
    rows.append(("reached again after, s", _words(result["reached_again_after_s"])))
    for kind, spread in result["ping_ms"].items():
        rows.append((f"write of 8 bytes, ms, {kind}", _words(spread)))
    for row in result["flat"]:
        text = ", ".join(
            f"{name} {row[name][0]:g} -> {row[name][1]:g}" for name in ("fds", "memfds", "threads", "maps", "anon_kib")
        )
        rows.append((f"process {row['who']} over {row['hours'] * 60:.1f} min", text))
    rows += [(name, str(n)) for name, n in result["counts"].items()]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def _words(spread: dict[str, float]) -> str:
    return f"p50 {spread['p50']:g}, p99 {spread['p99']:g}, max {spread['max']:g} ({spread['count']:g})"
