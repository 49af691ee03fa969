"""From vLLM's configuration objects to what caches.py takes."""

from __future__ import annotations

from typing import Any

from fabric_core import Unsupported
from fabric_kvcache.vllm.caches import LayerCache

__all__ = ["layer_caches", "packing_of", "rank_of"]


def rank_of(config: Any) -> tuple[int, int]:
    """Return (TP degree, this worker's TP rank)."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank  # type: ignore[import-not-found]

    return int(config.parallel_config.tensor_parallel_size), int(get_tensor_model_parallel_rank())


def layer_caches(kv_caches: dict[str, Any], cache_config: Any, config: Any) -> list[LayerCache]:
    """Return every layer's cache that moves. Raises Unsupported, naming the layer, for a kind that does not."""
    from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
        AttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    tp = config.parallel_config.tensor_parallel_size
    total = config.model_config.get_total_num_kv_heads()
    found: list[LayerCache] = []
    for index, group in enumerate(cache_config.transfer_groups):
        for name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            if not isinstance(spec, AttentionSpec):
                raise Unsupported(
                    f"the cache of {name} is a {type(spec).__name__}: FabricConnector moves attention only"
                )
            tensor = kv_caches.get(name)
            if tensor is None:
                continue
            latent = isinstance(spec, MLAAttentionSpec) or getattr(spec, "head_size_v", 1) == 0
            window = int(spec.sliding_window) if isinstance(spec, SlidingWindowSpec) else 0
            heads = spec.num_kv_heads * tp if tp <= total else total
            split = max(1, int(spec.block_size) // int(tensor.shape[2]))  # its kernel may want smaller blocks
            found.append(LayerCache(name, index, latent, 1 if latent else heads, window, tensor, split))
    return found


def packing_of(config: Any, caches: list[LayerCache]) -> str:
    """Return what blocks look like inside on a processor, where keys are packed for its instructions; else ""."""
    attention = [cache for cache in caches if not cache.latent]
    if caches[0].tensor.device.type != "cpu" or not attention:
        return ""  # tokens behind tokens; so are latent vectors everywhere
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # type: ignore[import-not-found]

    first = attention[0].tensor
    isa = _get_attn_isa(first.dtype, int(first.shape[2]), int(first.shape[3]) // 2, config.cache_config.cache_dtype)
    return f"cpu-{isa}"
