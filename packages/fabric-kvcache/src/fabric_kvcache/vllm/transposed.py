"""Blocks inside which keys are transposed, as vLLM's attention on processors has them ("cpu-vec"), said in tokens.

A head's part of a block is [dimension][token] of keys and [token][dimension] of values, one behind the other. So the
keys of some tokens are one run for each dimension, which a layout says thus: half a head's part is a page; the pages of
keys have each dimension for a "head" of one element; those of values have one vector per token. Each head of the model
is a pair of groups of its own, whose block tables name its pages.

That makes as many writes for a block and head as a key has dimensions, and one more. It is for pairs whose blocks
differ in size, where blocks cannot be moved as a whole, and for small models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fabric_core import ConfigError
from fabric_kvcache.cache import AttentionGroup, Group, LatentGroup

if TYPE_CHECKING:
    from fabric_kvcache.vllm.caches import LayerCache

__all__ = ["KNOWN", "MOST_WRITES", "Halves", "halves"]

KNOWN = "cpu-vec"  #: the only packing whose inside is known here
MOST_WRITES = 32_768  #: for one block of all layers and heads
_MOST_GROUPS = 64

#: Of one group: so many pages make a block of the block table, and these of them are the group's.
Halves = tuple[Group, int, tuple[int, ...]]


def halves(run: Sequence[LayerCache], common: dict[str, Any], *, tp: int) -> list[Halves]:
    """Return the groups of a run of layers: for each head one of keys and one of values.

    Args:
        run: layers that look alike and lie as a pool's layers do, layers outermost.
        common: what all groups of it have: layers, content, page_tokens, dtype and window.
        tp: tensor parallelism.

    Raises ConfigError.
    """
    first = run[0]
    _blocks, heads, tokens, content = first.tensor.shape
    dim = content // 2
    if tp > 1:
        raise ConfigError(f"pieces='tokens' with tensor parallelism of {tp}: it is for one rank; say pieces='blocks'")
    if dim % 2 or first.tensor.stride()[:2] != (heads * tokens * content, tokens * content):
        raise ConfigError(
            f"the cache of {first.name}: {dim} dimensions with strides {tuple(first.tensor.stride())}, where "
            "pieces='tokens' wants an even number of them, and heads behind heads; say pieces='blocks'"
        )
    writes = len(run) * heads * (dim + 1)
    if writes > MOST_WRITES or 2 * heads > _MOST_GROUPS:
        raise ConfigError(
            f"pieces='tokens' makes {writes} writes of each block of {len(run)} layers with {heads} heads: at most "
            f"{MOST_WRITES}, and {_MOST_GROUPS // 2} heads, are taken; say pieces='blocks', and one --block-size "
            "on both sides"
        )
    per_block = 2 * heads * first.split
    found: list[Halves] = []
    for head in range(heads):
        for number, name in enumerate(("keys", "values")):
            each = {**common, "content": f"{common['content']}:{name}:{head}"}
            group: Group = (
                LatentGroup(latent_dim=dim, **each)
                if number
                # Both planes are keys, the two halves of their dimensions: such a group has two.
                else AttentionGroup(kv_heads=dim // 2, head_dim=1, axes="LPKHT", **each)
            )
            mine = tuple(2 * (heads * piece + head) + number for piece in range(first.split))
            found.append((group, per_block, mine))
    return found
