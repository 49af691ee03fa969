"""Nothing grows (R9, R11): descriptors, threads, mappings, memory of the processes that lived through the run."""

from __future__ import annotations

from statistics import median
from typing import Any

from chaos.judge import Judge

__all__ = ["Flat", "slope"]

_LAST = 6  # samples that a mark looks back on
_WARM = 60.0  # seconds: what Python and malloc gain in the first minute is theirs (first messages, arenas, caches)
_ANON_KIB_WARM = 16384
_ANON_KIB = 3072  # after that, or after a third of the run: malloc's marks of the largest burst so far
_NAMES = ("fds", "memfds", "threads", "maps", "anon_kib")
#: how much more may be held at the end. Rounds with memory of their own come and go, and each holds a few of those.
_MORE = {"fds": 2, "memfds": 16, "threads": 0, "maps": 16}


def slope(points: list[tuple[float, float]]) -> float:
    """Return the least-squares slope; 0 for fewer than two points."""
    n = len(points)
    if n < 2:
        return 0.0
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


class Flat:
    """Footprints over time."""

    def __init__(self) -> None:
        self.samples: dict[int, list[dict[str, Any]]] = {}
        self.incs: dict[int, int] = {}
        self.marks: dict[str, dict[int, dict[str, float]]] = {}
        self.marked: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []

    def add(self, who: int, inc: int, line: dict[str, Any]) -> None:
        """A process told its footprint. A new engine or process begins anew."""
        if self.incs.get(who) != inc:
            self.incs[who] = inc
            self.samples[who] = []
        line = {**line, "memfds": line["kinds"].get("/memfd:fabric", 0)}
        line["fds"] -= line["memfds"]
        self.samples[who].append({"t": line["t"], "kinds": line["kinds"], **{name: line[name] for name in _NAMES}})

    def mark(self, name: str) -> None:
        """Remember what everybody holds now, in a calm moment."""
        self.marks[name] = {
            who: {"inc": self.incs[who], **{key: median(s[key] for s in samples[-_LAST:]) for key in _NAMES}}
            for who, samples in self.samples.items()
            if samples
        }
        self.marked[name] = max((s[-1]["t"] for s in self.samples.values() if s), default=0.0)

    def judge(self, judge: Judge) -> None:
        """Compare both calm moments, for the processes that lived through."""
        begin, end = self.marks.get("begin", {}), self.marks.get("end", {})
        for who in sorted(begin.keys() & end.keys()):
            if begin[who]["inc"] != end[who]["inc"]:
                continue
            first, last = begin[who], end[who]
            hours = (self.marked["end"] - self.marked["begin"]) / 3600
            points = [
                (s["t"], s["anon_kib"])
                for s in self.samples[who]
                if self.marked["begin"] <= s["t"] <= self.marked["end"]
            ]
            warm = max(_WARM, (self.marked["end"] - self.marked["begin"]) / 3)
            late = [(t, kib) for t, kib in points if t > points[0][0] + warm]
            row: dict[str, Any] = {name: [first[name], last[name]] for name in _NAMES}
            row |= {"who": who, "anon_kib_per_hour": round(slope(late) * 3600), "hours": round(hours, 3)}
            row["anon_kib_over_time"] = [[round(t), kib] for t, kib in points[:: max(1, len(points) // 60)]]
            self.rows.append(row)
            kinds = f"{self.samples[who][0]['kinds']} -> {self.samples[who][-1]['kinds']}"
            for name, more in _MORE.items():
                if last[name] > first[name] + more:
                    judge.break_(f"{name} grew", who, self.marked["end"], f"{first[name]} -> {last[name]}; {kinds}")
            grown = late[-1][1] - late[0][1] if late else 0.0
            if last["anon_kib"] - first["anon_kib"] > _ANON_KIB_WARM or grown > _ANON_KIB:
                judge.break_("memory grew", who, self.marked["end"], f"{grown:g} KiB after {warm:.0f} s; {row}")
