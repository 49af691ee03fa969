"""The two shapes of a `NodeGroup`: of the ranks that have one place in every node, and of the ranks of one node."""

from __future__ import annotations

from dataclasses import replace

from fabric_core import ConfigError
from fabric_moe.config import MoeConfig

__all__ = ["node_config", "rail_config", "scales_bytes"]


def _nodes(config: MoeConfig, node: int) -> int:
    if not 1 <= node <= config.ranks or config.ranks % node:
        raise ConfigError(f"node={node}: {config.ranks} ranks must be a multiple of the ranks of a node")
    if config.experts < config.ranks:
        raise ConfigError(f"{config.experts} experts on {config.ranks} ranks: a node without experts; use MoeGroup")
    if config.wire == "float64":
        raise ConfigError("wire_dtype='float64': weights travel as float32 between nodes; use MoeGroup")
    return config.ranks // node


def scales_bytes(config: MoeConfig) -> int:
    """Bytes of scales with room to begin a float32 behind them."""
    return -(-config.scale_bytes // 4) * 4


def rail_config(config: MoeConfig, node: int) -> MoeConfig:
    """Return the shape of the group across nodes: an "expert" is a node; all ids and weights travel with the scales."""
    nodes = _nodes(config, node)
    return replace(
        config,
        ranks=nodes,
        experts=nodes,
        topk=min(config.topk, nodes),
        scale_bytes=scales_bytes(config) + 8 * config.topk,
    )


def node_config(config: MoeConfig, node: int, at: int, forward_tokens: int | None = None) -> MoeConfig:
    """Return the shape of the group inside node `at`: its tokens are what arrives from all nodes at one rank."""
    nodes = _nodes(config, node)
    if forward_tokens is not None and not 1 <= forward_tokens <= nodes * config.max_tokens:
        raise ConfigError(f"forward_tokens={forward_tokens!r}: from 1 to {nodes * config.max_tokens}, all of a rail")
    bounds = config.expert_bounds
    return replace(
        config,
        ranks=node,
        experts=int(bounds[(at + 1) * node] - bounds[at * node]),
        max_tokens=nodes * config.max_tokens if forward_tokens is None else forward_tokens,
        out_dtype=config.wire,
        wire_dtype=config.wire,
    )
