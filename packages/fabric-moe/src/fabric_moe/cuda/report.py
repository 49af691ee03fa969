"""What kernels say went wrong: words in pinned host memory, and the errors made of them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from fabric_core import BadRange, FabricError
from fabric_moe.errors import RankLost, StepError

__all__ = ["Report"]

# As in common.cuh.
LOST, BAD_ID, BAD_LIVE, OVERFLOW, DISCARDED = 1, 2, 4, 8, 16


class Words(ctypes.Structure):
    """`struct Host` of common.cuh."""

    _fields_ = (
        ("code", ctypes.c_uint32),
        ("epoch", ctypes.c_uint32),
        ("culprits", ctypes.c_uint64),
        ("first", ctypes.c_int64),
        ("second", ctypes.c_int64),
    )


class Report:
    """Reads the words of one generation. A kernel writes them before it ends, and goes on or ends by itself."""

    def __init__(self, address: int, rank: int, experts: int, where: Mapping[int, str]) -> None:
        self._words = Words.from_address(address)
        self._rank = rank
        self._experts = experts
        self._where = where

    def error(self) -> FabricError | None:
        """Return what was said since the last time, None if nothing was. A lost rank is said again and again."""
        words = self._words
        code = int(words.code)
        if code == 0:
            return None
        if code & BAD_ID:
            words.code = code & ~BAD_ID
            return BadRange(
                f"rank {self._rank}: token {words.first} named expert {words.second}: experts go from 0 to "
                f"{self._experts - 1}, -1 is none. It was taken for none; the result of that step is not what was meant"
            )
        if code & BAD_LIVE:
            words.code = code & ~BAD_LIVE
            return BadRange(f"rank {self._rank}: live={words.first}, topk_ids has {words.second} tokens")
        if code & OVERFLOW:
            return BadRange(
                f"rank {self._rank}: a view needed {words.first} rows, its capacity is {words.second}: give capacity= "
                "for the fullest case. The group takes no further step"
            )
        if code & DISCARDED:
            words.code = code & ~DISCARDED
            gone = [r for r in range(64) if words.first >> r & 1]
            return StepError(f"rank {self._rank}: ranks {gone} discarded a step: its sums are not complete")
        culprits = [r for r in range(64) if words.culprits >> r & 1]
        who = ", ".join(
            f"rank {r}" + (" (this rank)" if r == self._rank else f" at {self._where.get(r, '?')}") for r in culprits
        )
        return RankLost(f"rank {self._rank}, use {words.epoch} of a slot: nothing came from {who}", ranks=culprits)
