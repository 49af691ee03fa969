"""Which tokens of a layer were pushed: a set of ranges that do not overlap."""

from __future__ import annotations

from bisect import bisect_left

from fabric_core import BadRange

__all__ = ["Coverage"]


class Coverage:
    """Ranges [first, end) in order; neighbours are joined, so a prompt pushed in order is one range."""

    __slots__ = ("_ends", "_firsts")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []

    def add(self, first: int, end: int) -> None:
        """Raises BadRange if a part of it is there already; then nothing has changed."""
        if self.overlaps(first, end):
            raise BadRange(f"tokens {first}..{end}: pushed before")
        at = bisect_left(self._firsts, first)
        before = at > 0 and self._ends[at - 1] == first
        after = at < len(self._firsts) and self._firsts[at] == end
        if before and after:
            self._ends[at - 1] = self._ends.pop(at)
            self._firsts.pop(at)
        elif before:
            self._ends[at - 1] = end
        elif after:
            self._firsts[at] = first
        else:
            self._firsts.insert(at, first)
            self._ends.insert(at, end)

    def overlaps(self, first: int, end: int) -> bool:
        """Whether a part of [first, end) is there."""
        at = bisect_left(self._firsts, first)
        return bool((at and self._ends[at - 1] > first) or (at < len(self._firsts) and self._firsts[at] < end))

    def gap(self, first: int, end: int) -> int | None:
        """Return the first token of [first, end) that is not there; None if all are."""
        for a, b in zip(self._firsts, self._ends, strict=True):
            if a > first:
                break
            first = max(first, b)
        return first if first < end else None
