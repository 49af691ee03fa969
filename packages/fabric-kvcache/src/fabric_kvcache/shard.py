"""Where the bytes of one rank's pools lie: strides and offsets of every group. The one place that computes them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from fabric_core import ConfigError
from fabric_kvcache.cache import CacheLayout, Group, StateGroup

__all__ = ["Field", "Shard", "held"]

_MAX_BYTES = 1 << 62  # offsets are int64 in numpy


def held(units: int, tp: int, rank: int) -> tuple[int, int]:
    """Return (first, count) of the units that a TP rank holds. Above `units` ranks, neighbours hold the same one."""
    if units >= tp:
        return rank * (units // tp), units // tp
    return rank // (tp // units), 1


@dataclass(frozen=True, slots=True)
class Field:
    """One array in a pool: [layer][page][plane][unit][token] of `item` bytes, in any order, given by its strides."""

    name: str  #: "kv", "scales", or a part of a state
    units: int  #: of the model
    first: int  #: the first unit here
    count: int  #: units here
    planes: int
    tokens: int  #: tokens of a page; 0: the field has one item per page and unit
    item: int  #: bytes
    base: int  #: where it begins in the rank's memory
    layer: int  #: strides, in bytes
    page: int
    plane: int
    unit: int
    token: int


@dataclass(frozen=True)
class Shard:
    """One rank of an instance with its pools: `pages` of each group, one pool behind another unless `bases` says where.

    Offsets of a plan count from the begin of the memory in which the pools lie.
    """

    layout: CacheLayout
    tp: int = 0  #: this rank
    pp: int = 0
    pages: int | tuple[int, ...] = 1  #: of each group's pool; for a state, slots
    bases: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("pages", "bases"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if not 0 <= self.tp < self.layout.tp:
            raise ConfigError(f"tp rank {self.tp} of {self.layout.tp}: must be below it")
        self.layout.stage_layers(self.pp)
        groups = len(self.layout.groups)
        for name, given in (("pages", self.pages), ("bases", self.bases)):
            if isinstance(given, tuple) and len(given) != groups and (given or name == "pages"):
                raise ConfigError(f"{name}={given}: the layout has {groups} groups; give a number for each")
        if any(count < 1 for count in self.pool_pages) or any(base < 0 for base in self.bases):
            raise ConfigError(f"pages={self.pages}, bases={self.bases}: at least one page, and no negative offset")

    def __str__(self) -> str:
        return f"TP {self.tp}/{self.layout.tp}, PP {self.pp}/{self.layout.pp}"

    @property
    def pool_pages(self) -> tuple[int, ...]:
        return (self.pages,) * len(self.layout.groups) if isinstance(self.pages, int) else self.pages

    def layers(self, group: int) -> tuple[int, ...]:
        """Return the model's layers in this rank's pool of a group, in the pool's order."""
        return _layers(self.layout, group, self.pp)

    def fields(self, group: int) -> tuple[Field, ...]:
        """Return the arrays of a group's pool."""
        return _pools(self)[group][0]

    @property
    def nbytes(self) -> int:
        """How much memory the pools need, from offset 0 on."""
        return max(end for _fields, end in _pools(self))


@functools.lru_cache(maxsize=1024)
def _layers(layout: CacheLayout, group: int, pp: int) -> tuple[int, ...]:
    stage = layout.stage_layers(pp)
    return tuple(layer for layer in layout.groups[group].layer_numbers if layer in stage)


@functools.lru_cache(maxsize=256)
def _pools(shard: Shard) -> list[tuple[tuple[Field, ...], int]]:
    """Of each group: its fields, and the offset where its pool ends."""
    pools: list[tuple[tuple[Field, ...], int]] = []
    for number, group in enumerate(shard.layout.groups):
        base = shard.bases[number] if shard.bases else (pools[-1][1] if pools else 0)
        make = _state_pool if isinstance(group, StateGroup) else _paged_pool
        pools.append(make(shard, number, group, base))
        if pools[-1][1] > _MAX_BYTES:
            raise ConfigError(
                f"group {number}: its pool ends at byte {pools[-1][1]}, at most {_MAX_BYTES}; fewer pages?"
            )
    return pools


def _strides(letters: str, extents: dict[str, int], item: int) -> dict[str, int]:
    strides = {}
    for letter in reversed(letters):
        strides[letter] = item
        item *= extents[letter]
    return strides


def _padded(group: Group, nbytes: int) -> int:
    if group.page_bytes and group.page_bytes < nbytes:
        raise ConfigError(f"page_bytes={group.page_bytes}: a page has {nbytes} bytes; give at least that, or 0")
    return group.page_bytes or nbytes


def _paged_pool(shard: Shard, number: int, group: Group, base: int) -> tuple[tuple[Field, ...], int]:
    assert not isinstance(group, StateGroup)
    first, count = held(group.units, shard.layout.tp, shard.tp)
    extents = {
        "L": len(shard.layers(number)),
        "P": shard.pool_pages[number],
        "K": group.planes,
        "H": count,
        "T": group.page_tokens,
    }
    letters, item, scale = group.letters, group.unit_bytes, group.scale_bytes
    behind_page = scale > 0 and group.scales_at == "page"
    strides = _strides(letters, extents, item)
    small = _strides(letters.replace("T", ""), extents, scale)  # of the scales, in a block of their own
    data = math.prod(extents.values()) * item
    inner = group.planes * count * group.page_tokens * item
    if set(letters[:2]) == {"L", "P"}:  # a page is one piece, and may have something behind its data
        page = _padded(group, inner + (group.planes * count * scale if behind_page else 0))
        strides.update(_strides(letters[:2], extents, page))
        data = extents["L"] * extents["P"] * page
    at, end = base + data, base + data + math.prod(extents[letter] for letter in "LPKH") * scale
    if behind_page:
        at, end = base + inner, base + data
        small.update({letter: strides[letter] for letter in "LP"})
    fields = [_field("kv", group.units, first, count, group.planes, group.page_tokens, item, base, strides)]
    if scale:
        fields.append(_field("scales", group.units, first, count, group.planes, 0, scale, at, small))
    return tuple(fields), end


def _state_pool(shard: Shard, number: int, group: Group, base: int) -> tuple[tuple[Field, ...], int]:
    assert isinstance(group, StateGroup)
    extents = {"L": len(shard.layers(number)), "P": shard.pool_pages[number]}
    counts = [held(part.units, shard.layout.tp, shard.tp) for part in group.parts]
    sizes = [count * part.unit_bytes for (_first, count), part in zip(counts, group.parts, strict=True)]
    page = _padded(group, sum(sizes))
    strides = _strides(group.letters, extents, page)
    fields = []
    at = base
    for (first, count), part, size in zip(counts, group.parts, sizes, strict=True):
        own = {**strides, "K": 0, "H": part.unit_bytes}
        fields.append(_field(part.name, part.units, first, count, 1, 0, part.unit_bytes, at, own))
        at += size
    return tuple(fields), base + extents["L"] * extents["P"] * page


def _field(
    name: str,
    units: int,
    first: int,
    count: int,
    planes: int,
    tokens: int,
    item: int,
    base: int,
    strides: dict[str, int],
) -> Field:
    return Field(
        name, units, first, count, planes, tokens, item, base,
        strides["L"], strides["P"], strides["K"], strides["H"], strides.get("T", 0),
    )  # fmt: skip
