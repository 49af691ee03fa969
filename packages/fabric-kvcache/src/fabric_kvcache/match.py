"""Can this cache be moved into that one? Pairs the groups of two layouts by their layers, or says why it cannot be."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from fabric_core import FabricError
from fabric_kvcache.cache import AttentionGroup, CacheLayout, Group, LatentGroup, StateGroup, show_layers

__all__ = ["LayoutMismatch", "Pair", "match"]


class LayoutMismatch(FabricError):
    """Two KV caches that cannot be mapped onto each other. The text is one sentence with both sides' values."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A group of the source and one of the destination with layers in common."""

    src: int
    dst: int
    layers: frozenset[int]


_Key = tuple[str, str, int]


@functools.lru_cache(maxsize=256)
def match(src: CacheLayout, dst: CacheLayout) -> tuple[Pair, ...]:
    """Pair the groups that hold the same layers. Raises LayoutMismatch."""
    here, there = _homes(src), _homes(dst)
    _same_layers(here, there)
    found: dict[tuple[int, int], list[int]] = {}
    for key, number in there.items():
        found.setdefault((here[key], number), []).append(key[2])
    pairs = tuple(Pair(a, b, frozenset(layers)) for (a, b), layers in sorted(found.items()))
    for pair in pairs:
        wrong = _difference(src.groups[pair.src], dst.groups[pair.dst])
        if wrong:
            layers = show_layers(tuple(pair.layers))
            raise LayoutMismatch(f"layers {layers}: {wrong}")
    return pairs


def _homes(layout: CacheLayout) -> dict[_Key, int]:
    """Where each layer is: (kind, content, layer) -> number of the group."""
    return {
        (type(group).__struct_config__.tag, group.content, layer): number  # type: ignore[misc]
        for number, group in enumerate(layout.groups)
        for layer in group.layer_numbers
    }


def _same_layers(here: dict[_Key, int], there: dict[_Key, int]) -> None:
    lacking = {key[:2] for key in here.keys() ^ there.keys()}
    for kind, content in sorted(lacking):
        a, b = (tuple(key[2] for key in side if key[:2] == (kind, content)) for side in (here, there))
        what = f"{kind} {content!r}" if content else kind
        raise LayoutMismatch(
            f"the source has {what} layers {show_layers(a) or '(none)'} and the destination "
            f"{show_layers(b) or '(none)'}: both must run the same model"
        )


def _difference(a: Group, b: Group) -> str:
    """Say in one sentence why group `a` cannot be moved into `b`, or ""."""
    if isinstance(a, StateGroup) or isinstance(b, StateGroup):
        same = isinstance(a, StateGroup) and isinstance(b, StateGroup) and _parts(a) == _parts(b)
        return "" if same else f"the source has {a} and the destination {b}: {_MODEL}"
    for field, shown, cure in _must_agree(a):
        mine, yours = getattr(a, field), getattr(b, field)
        if mine != yours:
            return f"the source has {shown} {mine} and the destination {yours}: {cure}"
    if a.scale_bytes and a.page_tokens % b.page_tokens:
        return (
            f"the source has a scale for {a.page_tokens} tokens (its page) and the destination one for "
            f"{b.page_tokens}: with scales, the source's page must be a multiple of the destination's"
        )
    if a.window and not 0 < b.window <= a.window:
        wants = f"the last {b.window} tokens" if b.window else "all tokens"
        return (
            f"the source keeps the last {a.window} tokens and the destination wants {wants}: "
            "the destination's window must be set, and be no larger"
        )
    return ""


_MODEL = "both must run the same model"


def _must_agree(group: AttentionGroup | LatentGroup) -> Iterator[tuple[str, str, str]]:
    """Yield (field, what it is called, what to do)."""
    if isinstance(group, AttentionGroup):
        yield "kv_heads", "a number of KV heads of", _MODEL
        yield "head_dim", "a head dimension of", _MODEL
    else:
        yield "latent_dim", "a latent dimension of", _MODEL
    yield "dtype", "elements of type", "start both with the same KV dtype, since bytes are moved as they are"
    yield "scale_bytes", "scales (0: none) of bytes", "start both with the same quantisation"


def _parts(group: StateGroup) -> dict[str, tuple[int, int]]:
    return {part.name: (part.units, part.unit_bytes) for part in group.parts}
