"""vLLM's quantisers around a step: before tokens travel, or after, and their scales in the shape that experts want.

Importing this module imports vLLM.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.utils import (  # type: ignore[import-not-found]
    moe_kernel_quantize_input,
    normalize_batched_scales_shape,
)

__all__ = ["quantised", "quantised_rows", "scales_that_came"]


def quantised(rows: Any, config: Any, *, sent: bool) -> tuple[Any, Any]:
    """Return [M, hidden] rows as vLLM's config of the experts wants them, and their scales (None: not quantised).

    `sent`: they are about to travel. Else they have: then scales lie as the experts want them, and "nvfp4" goes by the
    scale of the whole tensor.
    """
    if config.quant_dtype is None:
        return rows, None
    scale, more = config.a1_scale, {}
    if not sent:
        scale = config.a1_gscale if config.quant_dtype == "nvfp4" else config.a1_scale
        more["is_scale_swizzled"] = config.is_scale_swizzled
    found: tuple[Any, Any] = moe_kernel_quantize_input(
        rows, scale, quant_dtype=config.quant_dtype, per_act_token_quant=config.per_act_token_quant,
        block_shape=config.block_shape, **more,
    )  # fmt: skip
    return found


def quantised_rows(rows: Any, config: Any) -> tuple[Any, Any]:
    """The same for rows that came: [M, hidden], or [experts, capacity, hidden], whose scales have three dimensions."""
    flat, scales = quantised(rows.reshape(-1, rows.shape[-1]), config, sent=False)
    if rows.dim() == 3:
        scales = normalize_batched_scales_shape(scales, len(rows))
    return flat.reshape(*rows.shape[:-1], flat.shape[-1]), scales


def scales_that_came(view: Any, sent: Any) -> Any:
    """Return a view's scales, of the type of those that were sent."""
    if sent is None:
        return None
    if not view.rows:
        return sent[:0]
    import torch

    return torch.from_numpy(view.scales).reshape(view.rows, -1).view(sent.dtype).reshape(*view.shape, -1)
