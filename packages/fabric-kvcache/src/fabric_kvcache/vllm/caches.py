"""How vLLM's KV cache lies in memory, said as a `CacheLayout` of one rank.

vLLM hands over one tensor per layer, each a view `[block, head, token, content]` of one allocation. Everything is
derived from shapes, strides and addresses.

Where a token's content is one piece of memory, tokens are what is moved. Elsewhere a block is: the CPU's attention
keeps the keys of a block transposed, so that nothing smaller means anything. Then a block counts as one token (the
granule) of a layout whose pages hold one token, and the two sides' blocks must be of one size; or tokens are moved in
many small pieces, see transposed.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fabric_core import ConfigError
from fabric_kvcache.cache import AttentionGroup, CacheLayout, Group, LatentGroup
from fabric_kvcache.layout import ITEM_BYTES
from fabric_kvcache.shard import Shard
from fabric_kvcache.vllm.transposed import KNOWN, Halves, halves

__all__ = ["Caches", "LayerCache", "describe", "layer_number"]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache in this rank."""

    name: str
    group: int  #: of the engine's groups: which block table
    latent: bool  #: one vector per token (MLA), else keys and values per head
    heads: int  #: of the whole model
    window: int  #: tokens of a sliding window; 0: none
    tensor: Any  #: [block, head, token, content]
    split: int = 1  #: the tensor's blocks are pieces of those in block tables: so many make one


@dataclass(frozen=True, slots=True)
class Caches:
    """This rank's caches. `shard` counts in granules, `groups` says which block table each of its groups has."""

    shard: Shard
    groups: tuple[int, ...]
    pieces: tuple[tuple[int, tuple[int, ...]], ...]  #: pages that make a block of the table, and which of them are here
    granule: int  #: tokens
    address: int
    nbytes: int
    layers: dict[str, int]  #: vLLM's name -> the model's number

    def tables(self, blocks: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the block table of each group of the layout."""
        return [
            [pages * block + piece for block in blocks[group] for piece in mine]
            for group, (pages, mine) in zip(self.groups, self.pieces, strict=True)
        ]

    def done(self, tokens: int, total: int) -> int:
        """Return how many granules are complete once so many tokens of a prompt are computed."""
        return -(-tokens // self.granule) if tokens >= total else tokens // self.granule

    def whole(self, tokens: int) -> int:
        """Return how many granules hold so many tokens."""
        return -(-tokens // self.granule)


def layer_number(name: str) -> int:
    """Return the number in a layer's name. Raises ConfigError for none, or several."""
    numbers = [part for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ConfigError(f"the cache {name!r}: one number was expected in its name, which layer of the model it is")
    return int(numbers[0])


def describe(caches: Sequence[LayerCache], *, tp: int, rank: int, packing: str = "", pieces: str = "blocks") -> Caches:
    """Say where everything lies.

    Args:
        caches: of all layers that move, in any order.
        tp, rank: tensor parallelism, and this rank.
        packing: what a block looks like inside if it is not tokens behind tokens; "": it is, and tokens move.
        pieces: with a packing, "blocks" or "tokens" move.

    Raises ConfigError, naming the layer, for what cannot be described.
    """
    if not caches:
        raise ConfigError("the engine has no KV cache that moves")
    sizes = sorted({cache.tensor.shape[2] for cache in caches})
    inside = bool(packing) and pieces == "tokens"
    if inside and packing != KNOWN:
        raise ConfigError(f"pieces='tokens' with blocks that are {packing} inside: only {KNOWN} is known; say 'blocks'")
    if packing and not inside and len(sizes) > 1:
        raise ConfigError(
            f"this engine's groups have blocks of {sizes} tokens, whose inside ({packing}) is not known: only blocks "
            "of one size can be moved; choose another --block-size"
        )
    runs = _runs(sorted(caches, key=lambda cache: (cache.group, cache.tensor.data_ptr())))
    base = min(cache.tensor.data_ptr() for cache in caches)
    found: list[tuple[Sequence[LayerCache], Halves]] = []
    for run in runs:
        if inside:
            found += [(run, one) for one in halves(run, _common(run, packing, inside=True), tp=tp)]
        else:
            split = run[0].split
            found.append((run, (_group(run, packing), split, tuple(range(split)))))
    shard = Shard(
        CacheLayout(groups=tuple(group for _, (group, _, _) in found), tp=tp),
        tp=rank,
        pages=tuple(run[0].tensor.shape[0] * pages // run[0].split for run, (_, pages, _) in found),
        bases=tuple(run[0].tensor.data_ptr() - base for run, _ in found),
    )
    _check(shard, [run for run, _ in found], base, inside=inside)
    storages = {cache.tensor.untyped_storage().data_ptr(): cache.tensor.untyped_storage() for cache in caches}
    end = base + shard.nbytes
    if len(storages) > 1 or end > (room := next(iter(storages.values()))).data_ptr() + room.nbytes():
        raise ConfigError(
            f"the caches of {caches[0].name} and {caches[-1].name} are not pools within one allocation, which is what "
            "can be registered: use a vLLM that allocates its KV cache as one (0.32), with layers outermost"
        )
    return Caches(
        shard=shard,
        groups=tuple(run[0].group for run, _ in found),
        pieces=tuple((pages, mine) for _, (_, pages, mine) in found),
        granule=sizes[0] if packing and not inside else 1,
        address=base,
        nbytes=shard.nbytes,
        layers={cache.name: layer_number(cache.name) for cache in caches},
    )


def _key(cache: LayerCache) -> tuple[Any, ...]:
    tensor = cache.tensor
    shape = tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype)
    return cache.group, cache.split, cache.latent, cache.heads, cache.window, shape, _kind(cache.name)


def _kind(name: str) -> str:
    """What a layer's cache is called within its layer: tells several of one layer apart."""
    return re.sub(r"^.*\.\d+\.", "", name)[-40:]


def _runs(caches: Sequence[LayerCache]) -> list[list[LayerCache]]:
    """Put layers together that look alike and lie as a pool's layers do; else each is a pool of its own."""
    alike: dict[tuple[Any, ...], list[LayerCache]] = {}
    for cache in caches:
        alike.setdefault(_key(cache), []).append(cache)
    found: list[list[LayerCache]] = []
    for group in alike.values():
        at = [cache.tensor.data_ptr() for cache in group]
        steps = {b - a for a, b in itertools.pairwise(at)}
        page = _bytes(group[0], 0)
        layers_first = steps == {page * group[0].tensor.shape[0]}
        pages_first = len(steps) == 1 and page == len(group) * min(steps)
        found += [group] if layers_first or pages_first else [[cache] for cache in group]
    return found


def _bytes(cache: LayerCache, axis: int) -> int:
    """Return the stride of an axis, in bytes."""
    return int(cache.tensor.stride()[axis] * cache.tensor.element_size())


def _by_layer(run: Sequence[LayerCache]) -> bool:
    """Whether pages come first in its pool, and layers within them."""
    return len(run) > 1 and run[1].tensor.data_ptr() - run[0].tensor.data_ptr() < _bytes(run[0], 0)


def _common(run: Sequence[LayerCache], packing: str, *, inside: bool) -> dict[str, Any]:
    """What is said of a run's layers in any case. `inside`: tokens move, though blocks are packed."""
    first = run[0]
    tokens = int(first.tensor.shape[2])
    blocks = bool(packing) and not inside
    return {
        "layers": tuple(layer_number(cache.name) for cache in run),
        "content": f"{packing}:{_kind(first.name)}"[:64],
        "page_tokens": 1 if blocks else tokens,
        "dtype": _dtype(first.tensor.dtype, first.tensor.element_size()),
        "window": _window(first.window, tokens) if blocks else first.window,
    }


def _group(run: Sequence[LayerCache], packing: str) -> Group:
    first, tensor = run[0], run[0].tensor
    _blocks, heads, tokens, content = tensor.shape
    item = tensor.element_size()
    by_layer = _by_layer(run)
    # A page of a pool in which pages come first is one layer of a block.
    page_bytes = run[1].tensor.data_ptr() - tensor.data_ptr() if by_layer else _bytes(first, 0)
    outer = "PL" if by_layer else "LP"
    inner = tokens * content if packing else content
    common = {**_common(run, packing, inside=False), "page_bytes": page_bytes}
    wrong = tensor.stride()[3] != 1 or bool(content % (1 if first.latent else 2))
    wrong |= bool(packing) and tensor.stride()[2] != content
    if first.latent:
        if wrong or heads != 1:
            raise ConfigError(f"the cache of {first.name}: {_shape(tensor)} is no row of latent vectors")
        return LatentGroup(latent_dim=inner, axes=f"{outer}T", **common)  # type: ignore[arg-type]
    if packing or (_bytes(first, 2) == content * item and (heads == 1 or _bytes(first, 1) == tokens * content * item)):
        letters = f"{outer}HKT" if packing else f"{outer}HTK"
    elif _bytes(first, 1) == content * item and _bytes(first, 2) == heads * content * item:
        letters = f"{outer}THK"
    else:
        wrong = True
    if wrong:
        raise ConfigError(
            f"the cache of {first.name}: {_shape(tensor)} has neither heads nor tokens in a row; choose another "
            "--attention-backend"
        )
    return AttentionGroup(kv_heads=first.heads, head_dim=inner // 2, axes=letters, **common)


def _window(tokens: int, size: int) -> int:
    """Return how many of the last blocks hold the last tokens, wherever in its block the prompt ends."""
    return -(-(tokens - 1) // size) + 1 if tokens else 0


def _dtype(dtype: Any, item: int) -> str:
    name = str(dtype).rpartition(".")[2]
    if name in ITEM_BYTES:
        return name
    found = next((known for known, size in ITEM_BYTES.items() if size == item), None)
    if found is None:
        raise ConfigError(f"a cache of {name} elements: known are {', '.join(ITEM_BYTES)}")
    return found


def _shape(tensor: Any) -> str:
    return f"shape {tuple(tensor.shape)} with strides {tuple(tensor.stride())}"


def _check(shard: Shard, runs: Sequence[Sequence[LayerCache]], base: int, *, inside: bool) -> None:
    """Compare where the layout has each layer's blocks and heads with where the tensors have them."""
    for number, run in enumerate(runs):
        field = shard.fields(number)[0]
        for index, cache in enumerate(run):
            heads = cache.tensor.shape[1]
            same = base + field.base + index * field.layer == cache.tensor.data_ptr()
            if inside:  # a page is half a head's part
                same &= field.page * 2 * heads == _bytes(cache, 0)
            else:
                same &= field.page == _bytes(cache, 0) and field.count == heads
                same &= heads == 1 or field.unit == _bytes(cache, 1)
            if not same:
                raise ConfigError(
                    f"the cache of {cache.name} ({_shape(cache.tensor)}, {heads} of {cache.heads} heads, "
                    f"{shard}) does not lie where its layout says: {field}"
                )
