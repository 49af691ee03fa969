"""Shapes that others publish figures for, and a small one."""

from __future__ import annotations

from dataclasses import dataclass

from fabric_core import ConfigError
from fabric_moe.config import MoeConfig

__all__ = ["PRESETS", "Preset", "preset"]


@dataclass(frozen=True, slots=True)
class Preset:
    """A shape without the number of ranks."""

    help: str
    tokens: int  #: of each rank
    hidden: int
    experts: int
    topk: int
    dtype: str
    scale_bytes: int
    out_dtype: str

    def config(self, ranks: int, **changes: object) -> MoeConfig:
        """Return the shape for so many ranks. Raises ConfigError."""
        values: dict[str, object] = {
            "ranks": ranks, "experts": self.experts, "topk": self.topk, "hidden": self.hidden,
            "max_tokens": self.tokens, "dtype": self.dtype, "scale_bytes": self.scale_bytes,
            "out_dtype": self.out_dtype,
        }  # fmt: skip
        return MoeConfig(**{**values, **changes})  # type: ignore[arg-type]


PRESETS = {
    "decode": Preset(
        "DeepSeek-V3, 128 tokens a rank, fp8 with a float32 scale for 128 elements, bf16 back",
        128, 7168, 256, 8, "float8_e4m3fn", 224, "bfloat16",
    ),
    "prefill": Preset(
        "the same with 4096 tokens a rank", 4096, 7168, 256, 8, "float8_e4m3fn", 224, "bfloat16"
    ),
    "small": Preset("a quick look: 32 tokens of 512 bf16, top-4 of 16", 32, 512, 16, 4, "bfloat16", 0, "bfloat16"),
}  # fmt: skip


def preset(name: str) -> Preset:
    """Return a preset. Raises ConfigError."""
    if name not in PRESETS:
        raise ConfigError(f"--preset {name}: there are {', '.join(PRESETS)}")
    return PRESETS[name]
