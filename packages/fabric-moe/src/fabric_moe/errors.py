"""What goes wrong with a group, beyond what `fabric_core` raises."""

from __future__ import annotations

from collections.abc import Iterable

from fabric_core import FabricError, PeerLost

__all__ = ["RankLost", "StepError"]


class StepError(FabricError, ValueError):
    """A call that does not fit the state of its step: out of order, twice, or with the view of another step."""


class RankLost(PeerLost):
    """Ranks that did not do their part of a step in time, or are gone. `.ranks` names them.

    The group takes no further steps until `mask` or `regroup` made it anew: without them, or with them if they were
    only slow.
    """

    def __init__(self, reason: str = "", *, ranks: Iterable[int] = (), peer: str | None = None) -> None:
        super().__init__(
            reason,
            peer=peer,
            op="moe step",
            code="ETIMEDOUT",
            cure="mask() these ranks on all others, or regroup() with them when they are back",
        )
        self.ranks = tuple(sorted(ranks))
