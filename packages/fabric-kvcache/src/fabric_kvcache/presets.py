"""KV caches of known models, and how long their prefill computes: the names that `fabric kv` takes.

A preset is a layout with a compute time for every layer of every chunk. One model has published times (Qwen3-235B,
Table 3 of arXiv 2510.27656: TP 4 on H200); for lengths that are not in the table, and for the other models, times are
estimated from floating-point operations at the rate per GPU that the table implies. `Preset.origin` says which.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import msgspec

from fabric_core import ConfigError
from fabric_kvcache.cache import AttentionGroup, CacheLayout, LatentGroup
from fabric_kvcache.plan import Chunk

__all__ = ["PRESETS", "Paper", "Preset", "find_preset"]

# Of one H200, from the two chunks of the paper's 32K row (9.886 and 13.295 ms for 16,384 tokens of Qwen3-235B at TP 4):
# what does not depend on the context, and attention.
_LINEAR_FLOPS = 234e12
_ATTENTION_FLOPS = 645e12


@dataclass(frozen=True, slots=True)
class Paper:
    """A row of the paper's table, for a prompt of one length."""

    ttft_ms: float  #: prefill and the first token in one place
    disaggregated_ms: float
    last_layer_us: float  #: compute of a layer in the last chunk
    transfer_us: float  #: of a layer, in its last chunk

    @property
    def overhead_percent(self) -> float:
        return 100 * (self.disaggregated_ms / self.ttft_ms - 1)


@dataclass(frozen=True, slots=True)
class Preset:
    """A model as it is served."""

    name: str
    title: str
    layout: CacheLayout
    chunk_tokens: int  #: of prefill
    vocabulary: int
    active_parameters: float
    attention_flop: int  #: of a layer, for each pair of tokens, all heads together
    paper: dict[int, Paper]  #: by tokens of the prompt

    @property
    def tail_bytes(self) -> int:
        """The last logits as float32."""
        return 4 * self.vocabulary

    def chunks(self, tokens: int, chunk_tokens: int = 0) -> list[Chunk]:
        """Cut a prompt into the chunks of prefill; 0: the preset's own size."""
        size = chunk_tokens or self.chunk_tokens
        if tokens < 1 or size < 1:
            raise ConfigError(f"{tokens} tokens in chunks of {size}: both must be at least 1")
        marks = [*range(0, tokens, size), tokens]
        return [Chunk(first, end, tokens) for first, end in pairwise(marks)]

    def compute_us(self, tokens: int, chunk_tokens: int = 0) -> list[float]:
        """Return how long one layer computes in each chunk, in microseconds."""
        chunks = self.chunks(tokens, chunk_tokens)
        row = self._row(tokens, chunk_tokens)
        if row is None:
            return [self._estimate(chunk) for chunk in chunks]
        # The table has the sum and the last chunk. Between them the time grows with the context, so evenly.
        mean = row.ttft_ms * 1e3 / self.layout.total_layers / len(chunks)
        step = 2 * (row.last_layer_us - mean) / (len(chunks) - 1) if len(chunks) > 1 else 0.0
        return [row.last_layer_us - step * (len(chunks) - 1 - number) for number in range(len(chunks))]

    def origin(self, tokens: int, chunk_tokens: int = 0) -> str:
        """Say where `compute_us` comes from."""
        if self._row(tokens, chunk_tokens) is not None:
            return "published: arXiv 2510.27656, Table 3"
        return "estimated from floating-point operations"

    def _row(self, tokens: int, chunk_tokens: int) -> Paper | None:
        return self.paper.get(tokens) if chunk_tokens in {0, self.chunk_tokens} else None

    def _estimate(self, chunk: Chunk) -> float:
        count, context = chunk.end - chunk.first, (chunk.first + chunk.end) / 2
        linear = 2 * self.active_parameters / self.layout.total_layers / _LINEAR_FLOPS
        attention = self.attention_flop * context / _ATTENTION_FLOPS
        return 1e6 * count * (linear + attention) / self.layout.tp


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="qwen3-235b",
            title="Qwen3-235B-A22B, TP 4",
            # A page is 128 tokens of one head's K or V: 32 KiB, 256 of them for a layer of 4,096 tokens over all ranks.
            layout=CacheLayout(
                groups=(
                    AttentionGroup(
                        layers=94, kv_heads=4, head_dim=128, page_tokens=128, dtype="bfloat16", axes="separate-HND"
                    ),
                ),
                tp=4,
            ),
            chunk_tokens=16384,
            vocabulary=151936,
            active_parameters=22e9,
            attention_flop=4 * 64 * 128,
            paper={
                4096: Paper(214, 260, 2267, 661),
                32768: Paper(2179, 2317, 13295, 1606),
                131072: Paper(16735, 17056, 34900, 1610),
            },
        ),
        Preset(
            name="deepseek-v3",
            title="DeepSeek-V3 (MLA), TP 8",
            layout=CacheLayout(
                groups=(LatentGroup(layers=61, latent_dim=576, page_tokens=64, dtype="bfloat16"),), tp=8
            ),
            chunk_tokens=16384,
            vocabulary=129280,
            active_parameters=37e9,
            attention_flop=2 * 128 * (192 + 128),
            paper={},
        ),
        Preset(
            name="llama3-70b",
            title="Llama-3-70B, TP 8",
            layout=CacheLayout(
                groups=(
                    AttentionGroup(
                        layers=80, kv_heads=8, head_dim=128, page_tokens=16, dtype="bfloat16", axes="page-HND"
                    ),
                ),
                tp=8,
            ),
            chunk_tokens=16384,
            vocabulary=128256,
            active_parameters=70.6e9,
            attention_flop=4 * 64 * 128,
            paper={},
        ),
    )
}


def find_preset(text: str) -> Preset:
    """Return the preset NAME, or NAME:tpN with another TP degree. Raises ConfigError naming those there are."""
    name, colon, degree = text.partition(":")
    if name not in PRESETS:
        raise ConfigError(f"no preset is called {name!r}; there are {', '.join(PRESETS)}")
    preset = PRESETS[name]
    if not colon:
        return preset
    if not degree.startswith("tp") or not degree[2:].isdecimal() or not degree[2:].isascii():
        raise ConfigError(f"{text!r}: behind the colon of a preset stands its TP degree, for example {name}:tp2")
    layout = msgspec.structs.replace(preset.layout, tp=int(degree[2:]))
    # The published times hold for the published degree.
    return Preset(
        text, f"{preset.title.rpartition(',')[0]}, TP {layout.tp}", layout, preset.chunk_tokens, preset.vocabulary,
        preset.active_parameters, preset.attention_flop, preset.paper if layout.tp == preset.layout.tp else {},
    )  # fmt: skip
