"""What must hold between processes, judged by the one who knows what was done to whom.

Workers report facts with times of the machine's monotonic clock, which all of them share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chaos.plan import Options

__all__ = ["Judge", "quantile"]

FOREVER = float("inf")
_STARVED = 0.2  # seconds, of a heartbeat of 1: an engine that was away for a quarter of one begins to count anew
_STARVED_MOST = 10.0  # seconds of grace for that


def quantile(values: list[float], share: float) -> float:
    """Return the value below which `share` of them lie; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(slots=True)
class Trouble:
    """What was done to a process, from when to when."""

    id: int
    kind: str
    since: float
    until: float = FOREVER


@dataclass(slots=True)
class Duty:
    """Worker `who` must do something about incarnation `inc` of `whom` by `until`."""

    kind: str  # "lose": notice its loss; "meet": reach it, and be reached
    who: int
    whom: int
    inc: int
    since: float
    until: float
    why: str


@dataclass
class Judge:
    """Collects facts, finds breaks."""

    options: Options
    breaks: list[dict[str, Any]] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    duties: list[Duty] = field(default_factory=list)
    lost_after: dict[str, list[float]] = field(default_factory=lambda: {"kill": [], "stop": [], "reopen": []})
    met_after: list[float] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)  # seconds of a ping, nobody in trouble
    others: list[float] = field(default_factory=list)  # ... somebody else is in trouble
    prompt: list[float] = field(default_factory=list)  # ... in the first seconds of it
    lost: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)
    status: dict[int, dict[str, Any]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    starved: dict[int, float] = field(default_factory=dict)  # when the machine last kept a process waiting
    incs: dict[str, tuple[int, int]] = field(default_factory=dict)  # address -> process, incarnation

    def break_(self, what: str, who: int | None, now: float, detail: str = "") -> None:
        self.breaks.append({"what": what, "who": who, "t": now, "detail": detail})

    # ---- what was done

    def begin(self, id: int, kind: str, now: float) -> Trouble:
        """From now on nothing is asked of this process."""
        trouble = Trouble(id, kind, now)
        self.troubles.append(trouble)
        self.duties = [duty for duty in self.duties if duty.who != id and not (duty.whom == id and duty.kind == "meet")]
        return trouble

    def troubled(self, id: int | None, since: float, until: float, kinds: tuple[str, ...] = ()) -> bool:
        """Whether something was done to this process (None: to any) in that time."""
        return any(
            (id is None or t.id == id) and t.since <= until and t.until >= since and (not kinds or t.kind in kinds)
            for t in self.troubles
        )

    def must_lose(self, whom: int, inc: int, kind: str, since: float, living: list[int]) -> None:
        """Everybody who was connected names the loss within two heartbeats."""
        until = since + 2 * self.options.heartbeat + self.options.slack
        for who in living:
            state = self._row(who, whom)
            if state is not None and state[1] == inc and state[2] == "ready":
                self.duties.append(Duty("lose", who, whom, inc, since, until, kind))

    def not_lost(self, whom: int) -> None:
        """It came back before anybody had to notice."""
        self.duties = [duty for duty in self.duties if not (duty.whom == whom and duty.kind == "lose")]

    def must_meet(self, a: int, inc: int, others: list[tuple[int, int]], now: float) -> None:
        """`a` is back: everybody reaches it, and it reaches everybody."""
        until = now + 2 * self.options.heartbeat + 2 * self.options.connect_timeout + 2 * self.options.slack
        for b, b_inc in others:
            self.duties.append(Duty("meet", b, a, inc, now, until, "contact"))
            self.duties.append(Duty("meet", a, b, b_inc, now, until, "contact"))

    # ---- what is told

    def _row(self, who: int, whom: int) -> list[Any] | None:
        for row in self.status.get(who, {}).get("peers", ()):
            if row[0] == whom:
                found: list[Any] = row
                return found
        return None

    def on_lost(self, who: int, line: dict[str, Any]) -> None:
        found = self.incs.get(line["peer"])
        if found is None:
            self.break_("a peer that nobody knows was lost", who, line["t"], str(line))
            return
        whom, inc = found
        self.counts["losses"] += 1
        self.lost.setdefault((who, whom, inc), []).append(line["at"])
        patience = 2 * self.options.heartbeat + self.options.connect_timeout + self.options.slack
        since = line["at"] - patience
        if not self.troubled(who, since, line["t"]) and not self.troubled(whom, since, line["t"]):
            self.break_("a living peer was called lost", who, line["t"], f"{whom}.{inc}: {line['code']}")

    def on_status(self, who: int, line: dict[str, Any]) -> None:
        before = self.status.get(who, {})
        more = line["stalled"] - (before["stalled"] if before.get("inc") == line["inc"] else 0.0)
        if more > _STARVED * self.options.heartbeat and not self.troubled(who, line["t"] - 1, line["t"]):
            self.starved[who] = line["t"]
            self.counts["times that the machine starved a process"] += 1
        self.status[who] = line
        for at, whom, seconds in line["pings"]:
            end = at + seconds
            if self.troubled(who, at - 5, end) or self.troubled(whom, at - 5, end):
                continue
            if self.troubled(None, at - 1, end):
                self.others.append(seconds)
                if any(t.kind in ("kill", "stop") and 0 <= at - t.since <= 2 for t in self.troubles[-8:]):
                    self.prompt.append(seconds)
            elif not self.troubled(None, at - 5, end):
                self.calm.append(seconds)

    def on_suspect(self, who: int, line: dict[str, Any]) -> None:
        """Something that only a process stopped in the middle of a copy may do."""
        if not self.troubled(line["id"], line["since"] - 1, line["until"], ("stop", "kill")):
            self.break_(line["what"], who, line["t"], line["detail"])
        else:
            self.counts["late writes of stopped processes"] += 1

    # ---- whether it was in time

    def look(self, now: float) -> None:
        """Settle what is due."""
        check: dict[str, Callable[[Duty, float], bool]] = {"lose": self._lose, "meet": self._meet}
        self.duties = [duty for duty in self.duties if not check[duty.kind](duty, now)]

    def _lose(self, duty: Duty, now: float) -> bool:
        # A process that did not run could not see that another one stood still: its two heartbeats begin when it runs.
        patience = duty.until - duty.since
        until = min(max(duty.until, self.starved.get(duty.who, 0.0) + patience), duty.until + _STARVED_MOST)
        told = [t for t in self.lost.get((duty.who, duty.whom, duty.inc), ()) if t >= duty.since - 0.01]
        if told:
            self.lost_after[duty.why].append(told[0] - duty.since)
            if told[0] > until:
                self.break_("a loss was told late", duty.who, now, f"{duty}, after {told[0] - duty.since:.2f} s")
            return True
        if now > until + 2:
            self.break_("a loss was not told", duty.who, now, f"{duty}; {self._row(duty.who, duty.whom)}")
            return True
        return False

    def _meet(self, duty: Duty, now: float) -> bool:
        row = self._row(duty.who, duty.whom)
        if row is not None and row[1] == duty.inc and row[3] > duty.since:
            self.met_after.append(row[3] - duty.since)
            return True
        if now > duty.until + 2:
            self.break_("a peer that is back was not reached", duty.who, now, f"{duty}; {row}")
            return True
        return False
