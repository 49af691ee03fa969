"""Tiny random models out of transformers' configurations, with their KV caches open on both ends.

Each has a cache of another kind: KV heads that are shared by query heads (Qwen3), one latent vector a token
(DeepSeek-V3), and layers that look back only so far beside one that sees everything (Gemma3). Weights come from a seed,
so two processes have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_kvcache.cache import AttentionGroup, CacheLayout, Group, LatentGroup
from fabric_kvcache.shard import Shard

NAMES = ("qwen3", "deepseek-v3", "gemma3")
VOCABULARY = 256
TAIL_BYTES = 4 * VOCABULARY
WINDOW = 16
CHUNK = 20  # tokens of a prefill's chunk: ends inside pages
FAR = 1e4  # what stands where a layer with a window must not look: it would change every score

OnLayer = Callable[[int, int, NDArray[np.float32]], None]


def _config(name: str) -> Any:
    import transformers

    usual: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    if name == "qwen3":
        return transformers.Qwen3Config(**usual, head_dim=16)
    if name == "gemma3":
        return transformers.Gemma3TextConfig(**{**usual, "num_hidden_layers": 6}, head_dim=16, sliding_window=WINDOW)
    latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    return transformers.DeepseekV3Config(**{**usual, "num_key_value_heads": 4}, **latent, **experts)


class TinyModel:
    """`vectors` of a layer are float32 [token, plane, unit, dim]: K and V of each head, or one latent."""

    def __init__(self, name: str) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        torch.manual_seed(7)
        self.config = _config(name)
        self.model: Any = transformers.AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval()
        for parameter in self.model.parameters():
            if parameter.dim() > 1:  # larger than usual: else every token looks like the last one
                torch.nn.init.normal_(parameter, std=0.2)
        self.latent = name == "deepseek-v3"
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * self.config.num_hidden_layers
        self.windows = [WINDOW if kind == "sliding_attention" else 0 for kind in kinds]

    def layout(self, page_tokens: int) -> CacheLayout:
        c = self.config
        if self.latent:
            dim = c.kv_lora_rank + c.qk_rope_head_dim
            latent = LatentGroup(layers=len(self.windows), latent_dim=dim, page_tokens=page_tokens, dtype="float32")
            return CacheLayout(groups=(latent,))
        groups: list[Group] = [
            AttentionGroup(
                layers=tuple(layer for layer, each in enumerate(self.windows) if each == window),
                kv_heads=c.num_key_value_heads,
                head_dim=c.head_dim,
                page_tokens=page_tokens,
                dtype="float32",
                window=window,
            )
            for window in sorted(set(self.windows))
        ]
        return CacheLayout(groups=tuple(groups))

    def prefill(self, ids: Sequence[int], on_layer: OnLayer | None = None) -> tuple[Any, NDArray[np.float32]]:
        """Compute a prompt in chunks. Returns (cache, logits of the last token)."""
        import torch

        cache = self._cache(on_layer)
        logits = np.empty(0, np.float32)
        with torch.inference_mode():
            for first in range(0, len(ids), CHUNK):
                logits = self._forward(ids[first : first + CHUNK], cache)
        return cache, logits

    def generate(self, cache: Any, logits: NDArray[np.float32], count: int) -> list[int]:
        """Continue greedily."""
        import torch

        ids: list[int] = []
        with torch.inference_mode():
            while len(ids) < count:
                ids.append(int(logits.argmax()))
                logits = self._forward(ids[-1:], cache)
        return ids

    def load(self, layers: Sequence[NDArray[np.float32]]) -> Any:
        """Make a cache of the vectors of each layer."""
        import torch

        cache = self._cache(None)
        for number, vectors in enumerate(layers):
            whole = torch.from_numpy(vectors)
            if self.latent:
                parts = whole[:, 0, 0].split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
                keys, values = (part[None, None].contiguous() for part in parts)
            else:
                keys, values = (whole[:, plane].transpose(0, 1)[None].contiguous() for plane in (0, 1))
            cache.update(keys, values, number)
        return cache

    def _forward(self, ids: Sequence[int], cache: Any) -> NDArray[np.float32]:
        import torch

        out = self.model(
            input_ids=torch.tensor([list(ids)]), past_key_values=cache, use_cache=True, logits_to_keep=1
        )  # fmt: skip
        return np.asarray(out.logits[0, -1].float().numpy())

    def _cache(self, on_layer: OnLayer | None) -> Any:
        """Make a cache that keeps everything, and tells of what is put into it."""
        from transformers import DynamicCache

        latent = self.latent

        class Tapped(DynamicCache):  # type: ignore[misc]  # a class of an untyped package
            def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
                first = self.get_seq_length(layer)
                if on_layer is not None and latent:
                    on_layer(layer, first, np.concatenate([keys[0, 0], values[0, 0]], axis=1)[:, None, None])
                elif on_layer is not None:
                    on_layer(layer, first, np.stack([keys[0], values[0]]).transpose(2, 0, 1, 3))
                return super().update(keys, values, layer, *args, **kwargs)

        return Tapped()


def view(octets: NDArray[np.uint8], shard: Shard, layer: int) -> tuple[int, NDArray[np.float32]]:
    """Return (its group's number, [page, token, plane, unit, dim] in place) of a layer in a rank's memory."""
    for number in range(len(shard.layout.groups)):
        if layer in shard.layers(number):
            field = shard.fields(number)[0]
            begin = field.base + shard.layers(number).index(layer) * field.layer
            return number, np.lib.stride_tricks.as_strided(
                octets[begin:].view(np.float32),
                shape=(shard.pool_pages[number], field.tokens, field.planes, field.count, field.item // 4),
                strides=(field.page, field.token, field.plane, field.unit, 4),
            )
    raise KeyError(layer)
