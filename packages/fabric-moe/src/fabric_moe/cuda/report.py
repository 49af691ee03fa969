"""What kernels say went wrong: words in pinned host memory, and the errors made of them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from fabric_core import BadRange, FabricError
from fabric_moe.errors import RankLost, StepError

__all__ = ["Report", "Words"]

# As in common.cuh.
BAD_ID, BAD_LIVE, OVERFLOW, DISCARDED = range(4)


class Words(ctypes.Structure):
    """`struct Host` of common.cuh. The host writes `heard` and nothing else, so it undoes nothing."""

    _fields_ = (
        ("lost", ctypes.c_uint32),
        ("lost_epoch", ctypes.c_uint32),
        ("culprits", ctypes.c_uint64),
        ("told", ctypes.c_uint32 * 4),
        ("heard", ctypes.c_uint32 * 4),
        ("epoch", ctypes.c_uint32 * 4),
        ("first", ctypes.c_int64 * 4),
        ("second", ctypes.c_int64 * 4),
    )


class Report:
    """Reads the words of one generation. A kernel writes them before it ends, and goes on or ends by itself."""

    def __init__(self, address: int, rank: int, experts: int, where: Mapping[int, str]) -> None:
        self._words = Words.from_address(address)
        self._rank = rank
        self._experts = experts
        self._where = where

    @property
    def over(self) -> bool:
        """Whether the group takes no further step."""
        return self.lost or self._unheard(OVERFLOW)

    @property
    def lost(self) -> bool:
        """Whether a kernel gave up: no kernel takes a further step."""
        return bool(self._words.lost)

    def error(self) -> FabricError | None:
        """Return what was said since the last time, None if nothing was. What ends a group is said again and again."""
        words = self._words
        if self._unheard(OVERFLOW):
            return BadRange(
                f"rank {self._rank}: a view needed {words.first[OVERFLOW]} rows, its capacity is "
                f"{words.second[OVERFLOW]}: give capacity= for the fullest case. The group takes no further step"
            )
        if words.lost:
            return self._lost()
        for kind in (BAD_ID, BAD_LIVE, DISCARDED):
            if self._unheard(kind):
                first, second = int(words.first[kind]), int(words.second[kind])
                words.heard[kind] = words.told[kind]  # from now on a kernel may say it again
                return self._of_a_step(kind, first, second)
        return None

    def _unheard(self, kind: int) -> bool:
        return bool(self._words.told[kind] != self._words.heard[kind])

    def _of_a_step(self, kind: int, first: int, second: int) -> FabricError:
        if kind == BAD_ID:
            return BadRange(
                f"rank {self._rank}: token {first} named expert {second}: experts go from 0 to {self._experts - 1}, "
                "-1 is none. It was taken for none; the result of that step is not what was meant"
            )
        if kind == BAD_LIVE:
            return BadRange(f"rank {self._rank}: live={first}, topk_ids has {second} tokens")
        gone = [r for r in range(64) if first >> r & 1]
        return StepError(f"rank {self._rank}: ranks {gone} discarded a step: its sums are not complete")

    def _lost(self) -> RankLost:
        words = self._words
        culprits = [r for r in range(64) if words.culprits >> r & 1]
        who = ", ".join(
            f"rank {r}" + (" (this rank)" if r == self._rank else f" at {self._where.get(r, '?')}") for r in culprits
        )
        return RankLost(f"rank {self._rank}, use {words.lost_epoch} of a slot: nothing came from {who}", ranks=culprits)
