"""Which experts tokens take, drawn by chance: evenly, or limited to some groups of experts as DeepSeek-V3's gate is.

For predictions and benchmarks. A router that was trained is not even; what it does, only its own ids can say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import ConfigError

__all__ = ["Limit", "choose", "draw", "met"]

_BEST = 2  # a group is as good as its two best experts together


@dataclass(frozen=True, slots=True)
class Limit:
    """Experts lie in `groups` groups, side by side and of one size; a token takes those of at most `most` groups.

    DeepSeek-V3: 8 and 4. If each group lives on a node, a token meets 4 nodes at most.
    """

    groups: int
    most: int

    def check(self, experts: int, topk: int) -> None:
        """Raise ConfigError unless `topk` of so many experts can be chosen like this."""
        if self.groups < 1 or experts % self.groups:
            raise ConfigError(f"groups={self.groups}: experts={experts} must be a multiple of it")
        if not 1 <= self.most <= self.groups:
            raise ConfigError(f"most={self.most} groups of a token: from 1 to groups={self.groups}")
        if topk > (room := self.most * (experts // self.groups)):
            raise ConfigError(f"topk={topk}: {self.most} of {self.groups} groups hold {room} experts; raise most")


def choose(scores: NDArray[Any], topk: int, limit: Limit | None = None) -> NDArray[np.int64]:
    """Return [tokens, topk] experts for scores [tokens, experts]: the best ones, of the best groups if limited.

    In no order. Raises ConfigError if `topk` experts cannot be had.
    """
    tokens, experts = scores.shape
    if not 1 <= topk <= experts:
        raise ConfigError(f"topk={topk} of experts={experts}: from 1 to {experts}")
    if limit is not None:
        limit.check(experts, topk)
        size = experts // limit.groups
        grouped = scores.reshape(tokens, limit.groups, size)
        best = min(_BEST, size)
        worth = np.partition(grouped, size - best, axis=2)[:, :, size - best :].sum(axis=2)
        good = np.zeros(worth.shape, np.bool_)
        chosen = worth.argpartition(limit.groups - limit.most, axis=1)[:, limit.groups - limit.most :]
        np.put_along_axis(good, chosen, True, axis=1)
        scores = np.where(good[:, :, None], grouped, -np.inf).reshape(tokens, experts)
    return scores.argpartition(experts - topk, axis=1)[:, experts - topk :]


def draw(
    dice: np.random.Generator, tokens: int, experts: int, topk: int, limit: Limit | None = None
) -> NDArray[np.int64]:
    """Return [tokens, topk] experts for scores that are drawn evenly from 0 to 1. Raises as `choose`."""
    return choose(dice.random((tokens, experts)), topk, limit)


def met(ids: NDArray[np.int64], bounds: NDArray[np.int64]) -> float:
    """Return how many owners a token meets on average. Owner i holds the experts from bounds[i] up to bounds[i + 1]."""
    owners = np.sort(np.searchsorted(bounds, ids, side="right"), axis=1)
    return float(1 + (np.diff(owners, axis=1) != 0).sum(axis=1).mean())
