"""Temporary memory under a watermark: one registered buffer, allocated when the job starts, and a list of what is free.

The watermark cannot be exceeded, because there is no other place to put anything. `peak` says how close it came.
"""

from __future__ import annotations

from fabric_core import ConfigError

__all__ = ["ALIGN", "Arena", "aligned"]

ALIGN = 64  #: bytes


def aligned(nbytes: int) -> int:
    """Return the bytes that a request takes."""
    return -(-max(nbytes, 1) // ALIGN) * ALIGN


class Arena:
    """Ranges of [0, limit). First fit; not thread-safe."""

    def __init__(self, limit: int) -> None:
        if limit < ALIGN:
            raise ConfigError(f"a watermark of {limit} bytes: at least {ALIGN} are needed")
        self.limit = limit // ALIGN * ALIGN
        self.used = 0
        self.peak = 0  #: bytes in use at the same time, at most
        self._free: list[tuple[int, int]] = [(0, self.limit)]  # begin, end; sorted, never adjacent

    def must_hold(self, nbytes: int) -> None:
        """Raise ConfigError for what would not even fit into an empty arena."""
        if aligned(nbytes) > self.limit:
            raise ConfigError(
                f"{aligned(nbytes)} bytes of temporary memory are needed at once, the watermark is {self.limit}"
            )

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a free range, or None: wait until something is given back.

        Raises ConfigError for what would not even fit into an empty arena.
        """
        self.must_hold(nbytes)
        want = aligned(nbytes)
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= want:
                if end - begin == want:
                    del self._free[index]
                else:
                    self._free[index] = (begin + want, end)
                self.used += want
                self.peak = max(self.peak, self.used)
                assert self.used <= self.limit
                return begin
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Give a range back."""
        begin, end = offset, offset + aligned(nbytes)
        index = 0
        while index < len(self._free) and self._free[index][0] < begin:
            index += 1
        if (index and self._free[index - 1][1] > begin) or (index < len(self._free) and self._free[index][0] < end):
            raise ValueError(f"{begin}..{end} is free already")
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            begin = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (begin, end))
        self.used -= aligned(nbytes)
