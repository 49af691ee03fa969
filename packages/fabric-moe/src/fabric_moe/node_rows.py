"""What a token brings to another node: its scales, and behind them the ids and weights of all its experts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange
from fabric_moe.config import MoeConfig
from fabric_moe.dtypes import Bytes, as_rows, flat
from fabric_moe.node_shapes import scales_bytes
from fabric_moe.routing import route

__all__ = ["pack", "routing", "unpack"]


def routing(config: MoeConfig, ids: Any, weights: Any, live: Any) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return ids and weights [T, topk] of the live tokens as they travel. Raises BadRange as `MoeGroup` does."""
    plan = route(config, ids, weights, live, np.ones(config.ranks, np.bool_))
    return np.ascontiguousarray(plan.ids), np.ascontiguousarray(plan.weights, dtype=np.float32)


def pack(config: MoeConfig, ids: NDArray[np.int32], weights: NDArray[np.float32], scales: Any) -> Bytes:
    """Return [T, bytes]. Raises BadRange for scales that are missing, too few, or of another size."""
    at, k = scales_bytes(config), config.topk
    out = np.zeros((len(ids), at + 8 * k), np.uint8)
    if config.scale_bytes:
        if scales is None:
            raise BadRange(f"scales=None: the group was made with {config.scale_bytes} bytes for each token")
        rows = as_rows(flat(scales, "scales"), config.scale_bytes, "scales")
        if len(rows) < len(ids):
            raise BadRange(f"scales has {len(rows)} rows, topk_ids has {len(ids)} tokens")
        out[:, : config.scale_bytes] = rows[: len(ids)]
    elif scales is not None:
        raise BadRange("scales were given, but the group was made with scale_bytes=0")
    out[:, at : at + 4 * k] = ids.view(np.uint8)
    out[:, at + 4 * k :] = weights.view(np.uint8)
    return out


def unpack(config: MoeConfig, behind: Bytes) -> tuple[NDArray[np.int32], NDArray[np.float32], Bytes | None]:
    """Return ids, weights and scales of what arrived, [N, bytes]."""
    at, k = scales_bytes(config), config.topk
    ids = np.ascontiguousarray(behind[:, at : at + 4 * k]).view(np.int32)
    weights = np.ascontiguousarray(behind[:, at + 4 * k : at + 8 * k]).view(np.float32)
    return ids, weights, np.ascontiguousarray(behind[:, : config.scale_bytes]) if config.scale_bytes else None
