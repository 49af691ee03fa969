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
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange, ConfigError, FabricError, TransferEngine
from fabric_moe.config import MoeConfig
from fabric_moe.dtypes import as_rows, is_torch
from fabric_moe.errors import RankLost, StepError
from fabric_moe.group import MoeGroup
from fabric_moe.meet import Board
from fabric_moe.received import Received
from fabric_moe.step import Step
from fabric_moe.views import View

__all__ = ["NodeGroup", "NodeStep", "node_config", "rail_config"]

T = TypeVar("T")

_FOREIGN = 1 << 20  #: in a note to a group: a rank of all, not of that group


def _nodes(config: MoeConfig, node: int) -> int:
    if not 1 <= node <= config.ranks or config.ranks % node:
        raise ConfigError(f"node={node}: {config.ranks} ranks must be a multiple of the ranks of a node")
    if config.experts < config.ranks:
        raise ConfigError(f"{config.experts} experts on {config.ranks} ranks: a node without experts; use MoeGroup")
    if config.wire == "float64":
        raise ConfigError("wire_dtype='float64': weights travel as float32 between nodes; use MoeGroup")
    return config.ranks // node


def _scales(config: MoeConfig) -> int:
    """Bytes of scales with room to begin a float32 behind them."""
    return -(-config.scale_bytes // 4) * 4


def rail_config(config: MoeConfig, node: int) -> MoeConfig:
    """Return the shape of the group across nodes: an "expert" is a node; all ids and weights travel with the scales."""
    nodes = _nodes(config, node)
    return replace(
        config, ranks=nodes, experts=nodes, topk=min(config.topk, nodes), scale_bytes=_scales(config) + 8 * config.topk
    )


def node_config(config: MoeConfig, node: int, at: int, forward_tokens: int | None = None) -> MoeConfig:
    """Return the shape of the group inside node `at`: its tokens are what arrives from all nodes at one rank."""
    nodes = _nodes(config, node)
    bounds = config.expert_bounds
    return replace(
        config,
        ranks=node,
        experts=int(bounds[(at + 1) * node] - bounds[at * node]),
        max_tokens=nodes * config.max_tokens if forward_tokens is None else forward_tokens,
        out_dtype=config.wire,
        wire_dtype=config.wire,
    )


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
        try:
            for i, rank in enumerate(ranks):
                engine, place, at = engines[i % len(engines)], rank % node, rank // node
                shapes = rail_config(config, node), node_config(config, node, at, forward_tokens)
                rail = MoeGroup(engine, shapes[0], at, board, f"{job}.rail{place}", device="cpu")
                began.append(rail)
                inside = MoeGroup(engine, shapes[1], place, board, f"{job}.node{at}", device="cpu")
                began.append(inside)
                halves.append((rank, rail, inside))
            for group in began:
                group.regroup_end(timeout=timeout)
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
        its rail. A step with more raises BadRange on the rank that it happens to.
        """
        return cls.open_many(
            [engine], config, [rank], board, node=node, job=job, forward_tokens=forward_tokens, timeout=timeout
        )[0]

    # ---- dispatch

    def dispatch_send(self, x: Any, topk_ids: Any, topk_weights: Any = None, *, scales: Any = None) -> NodeStep:
        """Send each token once to each node of its experts. Arguments as those of `MoeGroup.dispatch_send`."""
        ids, weights = self._routing(topk_ids, topk_weights)
        nodes = self._node_of(ids)
        nodes.sort(axis=1)
        nodes[:, 1:][nodes[:, 1:] == nodes[:, :-1]] = -1
        # at most as many distinct ones as there are nodes; -1 first, so the last columns hold them all
        nodes.sort(axis=1)
        wanted = nodes[:, nodes.shape[1] - self.rail.config.topk :]
        extra = np.zeros((len(ids), self.rail.config.scale_bytes), np.uint8)
        if self.config.scale_bytes:
            if scales is None:
                raise BadRange(f"scales=None: the group was made with {self.config.scale_bytes} bytes for each token")
            flat = scales.reshape(scales.shape[0], -1) if len(scales.shape) > 2 else scales
            rows = as_rows(flat, self.config.scale_bytes, "scales")
            if len(rows) < len(ids):
                raise BadRange(f"scales has {len(rows)} rows, topk_ids has {len(ids)} tokens")
            extra[:, : self.config.scale_bytes] = rows[: len(ids)]
        at, k = _scales(self.config), self.config.topk
        extra[:, at : at + 4 * k] = ids.view(np.uint8)
        extra[:, at + 4 * k :] = weights.view(np.uint8)
        return NodeStep(self._call(self.rail, lambda: self.rail.dispatch_send(x, wanted, scales=extra)))

    def dispatch_forward(self, step: NodeStep, *, timeout: float | None = None) -> None:
        """Wait for the tokens of all nodes, and send them on inside this node. Raises RankLost, BadRange."""
        received = self._call(self.rail, lambda: self.rail.dispatch_recv(step.rail, timeout=timeout))
        view = received.compact()
        at, k = _scales(self.config), self.config.topk
        ids = np.ascontiguousarray(view.scales[:, at : at + 4 * k]).view(np.int32).copy()
        weights = np.ascontiguousarray(view.scales[:, at + 4 * k : at + 8 * k]).view(np.float32)
        here = (ids >= self._first) & (ids < self._last)
        ids = np.where(here, ids - self._first, -1)
        scales = np.ascontiguousarray(view.scales[:, : self.config.scale_bytes]) if self.config.scale_bytes else None
        step.view = view
        step.node = self._call(self.inside, lambda: self.inside.dispatch_send(view.tokens, ids, weights, scales=scales))

    def dispatch_recv(self, step: NodeStep, *, timeout: float | None = None) -> Received:
        """Wait for the tokens of this rank's experts. `first_expert` of what is returned counts within the node."""
        _, node = step.inside("dispatch_recv")
        found: Received = self._call(self.inside, lambda: self.inside.dispatch_recv(node, timeout=timeout))
        return found

    @property
    def first_of_node(self) -> int:
        """Number, among all experts, of this node's first one."""
        return self._first

    # ---- combine

    def combine_send(self, view: View, y: Any, *, weighted: bool = True, dtype: str | None = None) -> None:
        """Send the experts' results back inside the node. Arguments as those of `MoeGroup.combine_send`."""
        if dtype is None and not is_torch(y):
            dtype = self.config.out_dtype
        self._call(self.inside, lambda: self.inside.combine_send(view, y, weighted=weighted, dtype=dtype))

    def combine_forward(self, step: NodeStep, *, timeout: float | None = None) -> None:
        """Wait for the node's ranks, and send the sum of each token home."""
        view, node = step.inside("combine_forward")
        sums = self._call(self.inside, lambda: self.inside.combine_recv(node, timeout=timeout))
        self._call(self.rail, lambda: self.rail.combine_send(view, sums, dtype=self.config.wire))

    def combine_recv(
        self, step: NodeStep, *, out: Any = None, accumulate: bool = False, timeout: float | None = None
    ) -> Any:
        """Wait for the nodes' sums of this rank's tokens: [T, hidden]. See `MoeGroup.combine_recv`."""
        return self._call(
            self.rail, lambda: self.rail.combine_recv(step.rail, out=out, accumulate=accumulate, timeout=timeout)
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

    def _node_of(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        owner = np.searchsorted(self.config.expert_bounds, ids, side="right") - 1
        return np.where(ids >= 0, owner // self.node, -1)

    def _routing(self, ids: Any, weights: Any) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return ids and weights as they travel, `topk` for each token. Raises BadRange as `MoeGroup` does."""
        from fabric_moe.routing import route

        plan = route(self.config, ids, weights, None, np.ones(self.config.ranks, np.bool_))
        return np.ascontiguousarray(plan.ids), np.ascontiguousarray(plan.weights, dtype=np.float32)

    def _call(self, group: MoeGroup, call: Callable[[], T]) -> T:
        if self.broken is not None:
            raise self.broken
        try:
            return call()
        except RankLost as error:
            self.broken = lost = self._lost(group, error)
            raise lost from error

    def _lost(self, group: MoeGroup, error: RankLost) -> RankLost:
        """Name the ranks as this group counts them, and tell the other half of the group because of whom."""
        ranks = [r - _FOREIGN if r >= _FOREIGN else self._global(group, r) for r in error.ranks]
        other = self.inside if group is self.rail else self.rail
        other.notes.write(0, [rank + _FOREIGN for rank in ranks])
        who = ", ".join(f"rank {rank}" for rank in ranks) or "nobody in particular"
        where = "across nodes" if group is self.rail else "inside the node"
        return RankLost(f"rank {self.rank}, {where}: because of {who}: {error.reason}", ranks=ranks, peer=error.peer)

    def _global(self, group: MoeGroup, rank: int) -> int:
        return (
            rank * self.node + self.rank % self.node
            if group is self.rail
            else self.rank // self.node * self.node + rank
        )
