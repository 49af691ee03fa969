"""Ranks of several nodes: a token crosses the NIC once for each node, and goes on inside the node to its ranks.

    dispatch_send        each token to the nodes of its experts: to the rank there that has our place in the node
    dispatch_forward     waits for the other nodes; sends on, inside the node
    dispatch_recv        waits for the node's ranks
    combine_send         sums for each (token, rank) to the rank that sent the token on
    combine_forward      waits for the node's ranks; their sum, one for each (token, node), goes home
    combine_recv         waits for the other nodes

Two groups carry it: one of the ranks that have the same place in every node (a rail), one of the ranks of a node. Sums
are made in fixed order: top-k, ranks of the node, nodes; each rounded to `wire_dtype` before it travels, which is once
more than in a `MoeGroup` over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange, ConfigError, FabricError, TransferEngine
from fabric_moe.combine import result_type
from fabric_moe.config import MoeConfig
from fabric_moe.errors import RankLost, StepError
from fabric_moe.group import MoeGroup
from fabric_moe.meet import Board
from fabric_moe.membership import meet
from fabric_moe.node_rows import pack, routing, unpack
from fabric_moe.node_shapes import node_config, rail_config
from fabric_moe.received import Received
from fabric_moe.step import Step
from fabric_moe.views import View

__all__ = ["NodeGroup", "NodeStep", "node_config", "rail_config"]

T = TypeVar("T")

_FOREIGN = 1 << 20  #: in a note to a group: a rank of all, not of that group


@dataclass(slots=True)
class NodeStep:
    """A step under way. What a rank forwards is known after `dispatch_forward`."""

    rail: Step
    view: View | None = None  #: what arrived from other nodes
    node: Step | None = None

    def inside(self, call: str) -> tuple[View, Step]:
        """Return both, or raise StepError."""
        if self.view is None or self.node is None:
            raise StepError(f"{call}: dispatch_forward() of {self.rail!r} comes first")
        return self.view, self.node


class NodeGroup:
    """One rank of a group that spans nodes. Rank r is number r % node of node r // node.

    The six parts are called in the same order on all ranks; `*_send`, and what `*_forward` sends, waits for no rank
    that it is sent to. Host memory only; a rank that is lost ends the group: open a new one without it.
    """

    def __init__(self, config: MoeConfig, node: int, rank: int, rail: MoeGroup, inside: MoeGroup) -> None:
        self.config = config
        self.node = node
        self.rank = rank
        self.rail = rail
        self.inside = inside
        bounds = config.expert_bounds
        self._first = int(bounds[rank // node * node])
        self._last = int(bounds[(rank // node + 1) * node])
        self.broken: FabricError | None = None

    @classmethod
    def open_many(
        cls, engines: Sequence[TransferEngine], config: MoeConfig, ranks: Sequence[int], board: Board, *, node: int = 8,
        job: str = "moe", forward_tokens: int | None = None, timeout: float = 30.0,
    ) -> list[Self]:  # fmt: skip
        """Join with several ranks of one thread; rank i uses engine i modulo their number. See `open`."""
        halves: list[tuple[int, MoeGroup, MoeGroup]] = []
        began: list[MoeGroup] = []
        for rank in ranks:
            if not isinstance(rank, int) or not 0 <= rank < config.ranks:
                raise ConfigError(f"rank={rank!r}: ranks go from 0 to {config.ranks - 1}")
        try:
            for i, rank in enumerate(ranks):
                engine, place, at = engines[i % len(engines)], rank % node, rank // node
                shapes = rail_config(config, node), node_config(config, node, at, forward_tokens)
                rail = MoeGroup(engine, shapes[0], at, board, f"{job}.rail{place}", device="cpu")
                began.append(rail)
                inside = MoeGroup(engine, shapes[1], place, board, f"{job}.node{at}", device="cpu")
                began.append(inside)
                halves.append((rank, rail, inside))
            meet(began, timeout)
        except BaseException:
            for group in began:
                group.close()
            raise
        return [cls(config, node, rank, rail, inside) for rank, rail, inside in halves]

    @classmethod
    def open(
        cls, engine: TransferEngine, config: MoeConfig, rank: int, board: Board, *, node: int = 8, job: str = "moe",
        forward_tokens: int | None = None, timeout: float = 30.0,
    ) -> Self:  # fmt: skip
        """Join a group. `config` is that of all ranks; `node`: ranks of a node.

        forward_tokens: the most tokens that one rank passes on in a step, which its memory is made for. Default: all of
        its rail. A step with more raises BadRange on the rank that it happens to and ends the group: the others hear at
        once that this rank is lost.
        """
        return cls.open_many(
            [engine], config, [rank], board, node=node, job=job, forward_tokens=forward_tokens, timeout=timeout
        )[0]

    # ---- dispatch

    def dispatch_send(
        self, x: Any, topk_ids: Any, topk_weights: Any = None, *, scales: Any = None, live: Any = None
    ) -> NodeStep:
        """Send each token once to each node of its experts. Arguments as those of `MoeGroup.dispatch_send`."""
        ids, weights = routing(self.config, topk_ids, topk_weights, live)
        nodes = self._node_of(ids)
        nodes.sort(axis=1)
        nodes[:, 1:][nodes[:, 1:] == nodes[:, :-1]] = -1
        # at most as many distinct ones as there are nodes; -1 first, so the last columns hold them all
        nodes.sort(axis=1)
        wanted = nodes[:, nodes.shape[1] - self.rail.config.topk :]
        extra = pack(self.config, ids, weights, scales)
        return NodeStep(self._call(self.rail, lambda: self.rail.dispatch_send(x, wanted, scales=extra)))

    def dispatch_forward(self, step: NodeStep, *, timeout: float | None = None) -> None:
        """Wait for the tokens of all nodes, and send them on inside this node. Raises RankLost, BadRange."""
        received = self._call(self.rail, lambda: self.rail.dispatch_recv(step.rail, timeout=self._seconds(0, timeout)))
        view = received.compact()
        ids, weights, scales = unpack(self.config, view.scales)
        here = (ids >= self._first) & (ids < self._last)
        ids = np.where(here, ids - self._first, -1)
        step.view = view
        if len(ids) > (most := self.inside.config.max_tokens):
            error = BadRange(
                f"rank {self.rank} has {len(ids)} tokens to pass on in one step, forward_tokens is {most}: raise it; "
                "this group is over"
            )
            self._end(error)
            raise error
        step.node = self._call(self.inside, lambda: self.inside.dispatch_send(view.tokens, ids, weights, scales=scales))

    def dispatch_recv(self, step: NodeStep, *, timeout: float | None = None) -> Received:
        """Wait for the tokens of this rank's experts. `first_expert` of what is returned counts within the node."""
        _, node = step.inside("dispatch_recv")
        found: Received = self._call(
            self.inside, lambda: self.inside.dispatch_recv(node, timeout=self._seconds(1, timeout))
        )
        return found

    @property
    def first_of_node(self) -> int:
        """Number, among all experts, of this node's first one."""
        return self._first

    # ---- combine

    def combine_send(self, view: View, y: Any, *, weighted: bool = True, dtype: str | None = None) -> None:
        """Send the experts' results back inside the node. Arguments as those of `MoeGroup.combine_send`."""
        kind = result_type(y, dtype, self.config.out_dtype)
        self._call(self.inside, lambda: self.inside.combine_send(view, y, weighted=weighted, dtype=kind))

    def combine_forward(self, step: NodeStep, *, timeout: float | None = None) -> None:
        """Wait for the node's ranks, and send the sum of each token home."""
        view, node = step.inside("combine_forward")
        sums = self._call(self.inside, lambda: self.inside.combine_recv(node, timeout=self._seconds(2, timeout)))
        self._call(self.rail, lambda: self.rail.combine_send(view, sums, dtype=self.config.wire))

    def combine_recv(
        self, step: NodeStep, *, out: Any = None, accumulate: bool = False, timeout: float | None = None
    ) -> Any:
        """Wait for the nodes' sums of this rank's tokens: [T, hidden]. See `MoeGroup.combine_recv`."""
        seconds = self._seconds(3, timeout)
        return self._call(
            self.rail, lambda: self.rail.combine_recv(step.rail, out=out, accumulate=accumulate, timeout=seconds)
        )

    # ---- the rest

    def close(self) -> None:
        """Leave both groups. Idempotent."""
        self.broken = self.broken or FabricError("this group was closed")
        self.rail.close()
        self.inside.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _seconds(self, stage: int, timeout: float | None) -> float:
        """Return how long a call waits: a quarter more from call to call.

        So one that waits for a rank that itself waits in vain hears from it whom that one missed.
        """
        return self.config.timeout * (1 + stage / 4) if timeout is None else timeout

    def _node_of(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        owner = np.searchsorted(self.config.expert_bounds, ids, side="right") - 1
        return np.where(ids >= 0, owner // self.node, -1)

    def _call(self, group: MoeGroup, call: Callable[[], T]) -> T:
        if self.broken is not None:
            raise self.broken
        try:
            return call()
        except RankLost as error:
            self.broken = lost = self._lost(group, error)
            raise lost from error
        except BaseException:  # Ctrl-C in the middle of a send, too
            if group.broken is not None:
                self._end(group.broken)
            raise

    def _end(self, error: FabricError) -> None:
        """Take no further step, and tell all others that it is because of this rank."""
        self.broken = error
        for group in (self.rail, self.inside):
            group.notes.write(0, [self.rank + _FOREIGN])

    def _lost(self, group: MoeGroup, error: RankLost) -> RankLost:
        """Name the ranks as this group counts them, and tell the other half of the group because of whom."""
        ranks = [r - _FOREIGN if r >= _FOREIGN else self._global(group, r) for r in error.ranks]
        other = self.inside if group is self.rail else self.rail
        other.notes.write(0, [rank + _FOREIGN for rank in ranks])
        who = ", ".join(f"rank {rank}" for rank in ranks) or "nobody in particular"
        where = "across nodes" if group is self.rail else "inside the node"
        noted = any(rank >= _FOREIGN for rank in error.ranks)  # by the other half of the rank that we waited for
        why = f"{who}, as another rank has noted" if noted else f"{who}: {error.reason}"
        return RankLost(f"rank {self.rank}, {where}: because of {why}", ranks=ranks, peer=error.peer)

    def _global(self, group: MoeGroup, rank: int) -> int:
        return (
            rank * self.node + self.rank % self.node
            if group is self.rail
            else self.rank // self.node * self.node + rank
        )
