"""Who is alive, and who gets the next request.

    registry = Registry(directory, seed=7)
    with registry.choose("prefiller") as choice:
        try:
            with decoder.submit(choice.addresses, prompt).wait() as kv: ...
        except PeerLost:
            choice.failed()         # not chosen again until it shows that it lives

A registry looks at its directory when it is asked, at most four times in a lease; it has no thread. What it knows it
knows by its own clock: a record is alive until it has not changed for three quarters of its lease. If the directory
cannot be read, nobody is taken for dead on that account: one goes on with whom one knows.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from fabric_core import FabricError
from fabric_kvcache.member import BEATS, Directory, Member, Role

__all__ = ["Choice", "NobodyThere", "Registry"]

_IDLE_POLL = 0.25  # seconds between looks while nobody with a lease is known
_SWEEP = 4  # leases after which a dead record is dropped


class NobodyThere(FabricError):
    """No live member of a role. The text tells who is known, and why none of them will do."""


@dataclass(slots=True)
class _Seen:
    """What is known of a member."""

    member: Member
    changed: float  #: when its record was last seen to change
    suspect: float | None = None  #: since when, if a request to it has failed


class Choice:
    """A member that was chosen for a request. `done` (or the end of `with`) ends the request's account."""

    def __init__(self, registry: Registry, member: Member) -> None:
        self.member = member
        self._registry: Registry | None = registry

    @property
    def addresses(self) -> list[str]:
        """Of all its ranks' engines."""
        return list(self.member.addresses)

    def done(self) -> None:
        """The request has ended, one way or the other. Idempotent."""
        registry, self._registry = self._registry, None
        if registry is not None:
            registry._done(self.member)

    def failed(self) -> None:
        """The member did not do it: it is avoided until it shows that it lives (or, in a fixed list, for a while)."""
        if self._registry is not None:
            self._registry._suspect(self.member)
        self.done()

    def __enter__(self) -> Choice:
        return self

    def __exit__(self, *exc: object) -> None:
        self.done()


class Registry:
    """A view of a directory; any thread.

    `seed`: of the choice among equals. `hold`: seconds for which a member without a lease is avoided after a failure.
    """

    def __init__(
        self,
        directory: Directory,
        *,
        seed: int | None = None,
        hold: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.problem: FabricError | None = None  #: why the last look failed; None: it did not
        self._random = random.Random(seed)
        self._hold = hold
        self._clock = clock
        self._lock = threading.RLock()  # guards all below
        self._seen: dict[str, _Seen] = {}  # by name
        self._looked: float | None = None
        self._outstanding: Counter[tuple[str, str]] = Counter()  # by name and incarnation

    # ---- asking

    def members(self, role: Role | None = None) -> list[Member]:
        """Return who is alive, by name; draining ones too."""
        with self._lock:
            self._look()
            return [s.member for s in self._alive() if role is None or s.member.role == role]

    def choose(self, role: Role, *, avoid: Collection[str] = (), layout: str = "") -> Choice:
        """Choose the live member with the fewest requests; `avoid`: names; `layout`: only members with the same.

        Requests are counted here, and by the members themselves for what others send; the larger number counts.
        Raises NobodyThere.
        """
        with self._lock:
            self._look()
            able = self._able(role, avoid, layout)
            if not able:
                self._look(now=True)
                able = self._able(role, avoid, layout)
            if not able:
                raise NobodyThere(self._why_not(role, avoid, layout))
            least = min(self._load(member) for member in able)
            member = self._random.choice([m for m in able if self._load(m) == least])
            self._outstanding[_key(member)] += 1
            return Choice(self, member)

    def outstanding(self, name: str) -> int:
        """Return how many requests chosen here are under way at a member."""
        with self._lock:
            return sum(count for (other, _incarnation), count in self._outstanding.items() if other == name)

    # ---- inside, with the lock held

    def _able(self, role: Role, avoid: Collection[str], layout: str) -> list[Member]:
        return [
            s.member
            for s in self._alive()
            if s.member.role == role
            and s.member.state == "serving"
            and s.member.name not in avoid
            and s.suspect is None
            and layout in {"", s.member.layout}
        ]

    def _load(self, member: Member) -> int:
        return max(member.load, self._outstanding[_key(member)])

    def _alive(self) -> list[_Seen]:
        now = self._clock()
        return [seen for _name, seen in sorted(self._seen.items()) if not self._expired(seen, now)]

    @staticmethod
    def _expired(seen: _Seen, now: float) -> bool:
        # A look may come a beat after the change, and the last change a beat before the death: together one lease.
        return seen.member.beat >= 0 and now - seen.changed >= seen.member.lease_ms / 1000 * (BEATS - 1) / BEATS

    def _interval(self) -> float:
        leases = [s.member.lease_ms for s in self._seen.values() if s.member.beat >= 0]
        return min(leases) / 1000 / BEATS if leases else _IDLE_POLL

    def _look(self, *, now: bool = False) -> None:
        time_ = self._clock()
        if not now and self._looked is not None and time_ - self._looked < self._interval():
            return
        blind, before = self.problem is not None, self._looked
        self._looked = time_
        try:
            records = self.directory.read()
            self.problem = None
        except FabricError as error:
            self.problem = error
        if blind or self.problem is not None:  # nobody is dead because we are blind
            for seen in self._seen.values():
                if before is None or not self._expired(seen, before):
                    seen.changed = time_
        if self.problem is not None:
            return
        names = set()
        for member in records:
            names.add(member.name)
            known = self._seen.get(member.name)
            if known is None or known.member.incarnation != member.incarnation:
                self._seen[member.name] = _Seen(member, time_)
            elif known.member.beat != member.beat:
                known.member, known.changed, known.suspect = member, time_, None
            elif known.member.beat < 0:
                known.member = member
        for name in [name for name in self._seen if name not in names]:
            del self._seen[name]  # it closed its registration
        for seen in self._seen.values():
            if seen.member.beat < 0 and seen.suspect is not None and time_ - seen.suspect >= self._hold:
                seen.suspect = None
            if seen.member.beat >= 0 and time_ - seen.changed > _SWEEP * seen.member.lease_ms / 1000:
                self._sweep(seen.member)

    def _sweep(self, member: Member) -> None:
        try:
            self.directory.forget(member)
        except FabricError as error:
            self.problem = error

    def _done(self, member: Member) -> None:
        with self._lock:
            self._outstanding[_key(member)] -= 1
            if self._outstanding[_key(member)] <= 0:
                del self._outstanding[_key(member)]

    def _suspect(self, member: Member) -> None:
        with self._lock:
            seen = self._seen.get(member.name)
            if seen is not None and seen.member.incarnation == member.incarnation:
                seen.suspect = self._clock()

    def _why_not(self, role: Role, avoid: Collection[str], layout: str) -> str:
        reasons = []
        now = self._clock()
        for name, seen in sorted(self._seen.items()):
            member = seen.member
            if member.role != role:
                continue
            if self._expired(seen, now):
                reasons.append(f"{name} has been silent for {now - seen.changed:.1f} s")
            elif member.state != "serving":
                reasons.append(f"{name} is draining")
            elif name in avoid:
                reasons.append(f"{name} was tried")
            elif seen.suspect is not None:
                reasons.append(f"{name} has failed")
            elif layout not in {"", member.layout}:
                reasons.append(f"{name} has layout {member.layout!r}, not {layout!r}")
        blind = f"; the directory cannot be read: {self.problem}" if self.problem is not None else ""
        return f"no {role} to choose: {'; '.join(reasons) or 'none is known'}{blind}"


def _key(member: Member) -> tuple[str, str]:
    return member.name, member.incarnation
