"""Makes Markdown of the lines that run.py wrote: fabric beside the best peer and the limit, then everybody."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["render"]

_OURS = ("fabric", "fabric-user")
_LIMITS = {"fabric": "limit", "fabric-user": "limit-user"}
_UNITS = {
    "write": "GB/s",
    "paged": "GB/s",
    "paged_build": "us",
    "paged_post": "us",
    "ping": "us",
    "submit": "us",
    "register": "us",
    "deregister": "us",
    "connect": "ms",
}

#: (op, size, pages)
_Row = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure of one peer: over the rounds, the median of its medians and their range, and the median bad end."""

    median: float
    low: float
    high: float
    tail: float
    rounds: int
    by_round: dict[int, float]  #: of each round its median

    def __str__(self) -> str:
        spread = f" [{_short(self.low)}..{_short(self.high)}]" if self.rounds > 1 else ""
        return f"{_short(self.median)}{spread}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _size(nbytes: int) -> str:
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def _label(row: _Row) -> str:
    op, size, pages = row
    what = op.replace("_", " ")
    if pages:
        what += f" {pages:,} x {_size(size)}"
    elif size:
        what += f" {_size(size)}"
    return f"{what}, {_UNITS[op]}"


def _gain(row: _Row, ours: Cell | None, other: Cell | None) -> str:
    """Return how many times better ours is."""
    if not ours or not other or not ours.median or not other.median:
        return "-"
    ratio = ours.median / other.median
    return f"{ratio if _UNITS[row[0]].endswith('/s') else 1 / ratio:.2f}"


def _turns(row: _Row, ours: Cell | None, other: Cell | None) -> str:
    """Return the median of each round's ratio, and the middle half: the machine's speed may move between rounds."""
    common = sorted(set(ours.by_round) & set(other.by_round)) if ours and other else []
    if not ours or not other or len(common) < 3 or not all(other.by_round[k] and ours.by_round[k] for k in common):
        return "-"
    ratios = [ours.by_round[k] / other.by_round[k] for k in common]
    if not _UNITS[row[0]].endswith("/s"):
        ratios = [1 / ratio for ratio in ratios]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} [{low:.2f}..{high:.2f}]"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _better(row: _Row, cells: dict[str, Cell]) -> str | None:
    """Return which peer has the best figure."""
    best = max if _UNITS[row[0]].endswith("/s") else min
    return best(cells, key=lambda name: cells[name].median, default=None)


def _read(path: Path, max_others: float | None) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Return what is said of the machine, the lines to be used, and how many were left out."""
    with path.open() as file:
        lines = [json.loads(line) for line in file]
    machine: dict[str, Any] = next((line for line in lines if "machine" in line), {})
    figures = [line for line in lines if "peer" in line]
    used = [line for line in figures if max_others is None or line["others"] <= max_others]
    return machine, used, len(figures) - len(used)


def render(path: Path, max_others: float | None = None) -> str:
    machine, lines, left_out = _read(path, max_others)
    values: dict[_Row, dict[str, list[dict[str, Any]]]] = {}
    problems: set[str] = set()
    versions: dict[str, str] = {}
    for line in lines:
        if "version" in line:
            versions[line["peer"]] = line["version"]
        if "error" in line:
            problems.add(f"{line['peer']}, {line['op']}: {line['error']}")
        elif line.get("verified") is False:
            problems.add(f"{line['peer']}, {line['op']} {_size(line['size'])}: wrong data")
        elif "p50" in line:
            row = line["op"], line["size"], line.get("pages", 0)
            values.setdefault(row, {}).setdefault(line["peer"], []).append(line)
    cells = {
        row: {
            name: Cell(
                statistics.median(found := [line["p50"] for line in some]),
                min(found),
                max(found),
                statistics.median(line["p99"] for line in some),
                len(some),
                {line.get("round", 0): line["p50"] for line in some},
            )
            for name, some in peers.items()
        }
        for row, peers in values.items()
    }
    order = list(_UNITS)
    rows = sorted(cells, key=lambda row: (order.index(row[0]), -row[2], row[1]))
    others = [line["others"] for line in lines]
    parts = [
        f"{machine.get('machine')}, {machine.get('processors')} processors, Linux {machine.get('kernel')}, Python "
        f"{machine.get('python')}, {machine.get('date')}. Medians of {machine.get('rounds')} rounds, lowest and "
        "highest round in brackets.",
        "Versions: " + ", ".join(f"{name} {number}" for name, number in sorted(versions.items())) + ".",
    ]
    if others:
        parts.append(f"Others used {statistics.median(others):.2f} processors meanwhile, at most {max(others):.2f}.")
    if left_out:
        parts.append(f"{left_out} figures of busier moments than {max_others} processors are left out.")
    if machine.get("transport", "host") != "host":
        parts.append(f"Everybody over {machine['transport']}.")
    if machine.get("quick"):
        parts.append("**A quick run: these figures say only that everything works.**")
    text = [" ".join(parts), "", _compared(rows, cells), "", _everybody(rows, cells)]
    if problems:
        text += ["", "Problems:", "", *(f"- {problem}" for problem in sorted(problems))]
    return "\n".join(text)


def _compared(rows: list[_Row], cells: dict[_Row, dict[str, Cell]]) -> str:
    head = ["figure", "fabric", "p99", "user memory", "best peer", "fabric : peer", "by round", "user : peer"]
    head += ["limit", "fabric : limit", "user limit", "user : limit"]
    body = []
    for row in rows:
        have = cells[row]
        best = _better(row, {n: c for n, c in have.items() if n not in _OURS and n not in _LIMITS.values()})
        line = [_label(row), str(have.get("fabric", "-"))]
        line += [_short(have["fabric"].tail) if "fabric" in have else "-", str(have.get("fabric-user", "-"))]
        line += [f"{best} {have[best]}" if best else "-"]
        gains = [_gain(row, have.get(name), have[best] if best else None) for name in _OURS]
        line += [gains[0], _turns(row, have.get("fabric"), have[best] if best else None), gains[1]]
        for name in _OURS:
            limit = have.get(_LIMITS[name])
            line += [_short(limit.median) if limit else "-", _gain(row, have.get(name), limit)]
        body.append(line)
    note = "Ratios above 1: fabric is better. By round: the median of the rounds' ratios, and their middle half."
    return note + "\n\n" + _table(head, body)


def _everybody(rows: list[_Row], cells: dict[_Row, dict[str, Cell]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in cells[row]))
    names.sort(key=lambda name: (name not in _OURS, name in _LIMITS.values()))
    body = [
        [_label(row), *(_short(cells[row][name].median) if name in cells[row] else "-" for name in names)]
        for row in rows
    ]
    return "Everybody's medians:\n\n" + _table(["figure", *names], body)
