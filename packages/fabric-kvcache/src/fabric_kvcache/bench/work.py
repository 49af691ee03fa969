"""One question of `fabric kv bench`, as both processes know it: layouts, prompt, page tables. Plain data and numpy."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fabric_core import ConfigError
from fabric_kvcache.cache import CacheLayout, StateGroup
from fabric_kvcache.plan import Plan, make_plan
from fabric_kvcache.shard import Shard

__all__ = ["Work", "cut_layers"]

_SPARE_PAGES = 7  # pages of a pool that are nobody's: some must stay as they are


def cut_layers(layout: CacheLayout, layers: int) -> CacheLayout:
    """Return the layout of the first so many layers of a model; 0: of all."""
    if not layers or layers >= layout.total_layers:
        return layout
    if layout.stages:
        raise ConfigError("a layout with stages cannot be cut to fewer layers: leave --layers out")
    groups = []
    for group in layout.groups:
        kept = tuple(layer for layer in group.layer_numbers if layer < layers)
        if kept:
            groups.append(msgspec.structs.replace(group, layers=kept))
    return msgspec.structs.replace(layout, groups=tuple(groups))


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt of `tokens` that all source ranks write into one destination rank."""

    src: CacheLayout
    dst: CacheLayout
    dst_tp: int = 0  #: the destination's rank
    dst_pp: int = 0
    tokens: int
    tail_bytes: int
    seed: int
    adjacent: bool = False  #: pages that lie one behind another, instead of anywhere

    @property
    def target(self) -> Shard:
        return Shard(self.dst, tp=self.dst_tp, pp=self.dst_pp, pages=self._pool(self.dst))

    def sources(self) -> list[Shard]:
        """Return the source ranks that have something for the destination rank."""
        pages = self._pool(self.src)
        ranks = [Shard(self.src, tp=tp, pp=pp, pages=pages) for pp in range(self.src.pp) for tp in range(self.src.tp)]
        return [rank for rank in ranks if self.plan(rank).jobs]

    def plan(self, source: Shard) -> Plan:
        return make_plan(source, self.target, seed=self.seed)

    def _pool(self, layout: CacheLayout) -> tuple[int, ...]:
        return tuple(_pages(group, self.tokens) + _SPARE_PAGES for group in layout.groups)

    def tables(self, layout: CacheLayout, side: int) -> list[Any]:
        """Return the block table of each group: random pages of its pool. `side`: 0 for the source, 1."""
        rng = np.random.default_rng([self.seed, side])
        found = []
        for group in layout.groups:
            count = _pages(group, self.tokens)
            order = np.arange(count + _SPARE_PAGES) if self.adjacent else rng.permutation(count + _SPARE_PAGES)
            found.append(order[:count].astype(np.uint32))
        return found

    @property
    def scales(self) -> dict[tuple[str, int], int]:
        """Tokens that one scale of the source holds for, by content and layer."""
        return {
            (group.content, layer): group.page_tokens
            for group in self.src.groups
            if not isinstance(group, StateGroup)
            for layer in group.layer_numbers
        }

    @property
    def tail_offset(self) -> int:
        """Where the tail lies in the destination's memory: behind the pools."""
        return -(-self.target.nbytes // 64) * 64

    @property
    def target_bytes(self) -> int:
        return self.tail_offset + max(64, self.tail_bytes)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Work:
        """Raises ConfigError."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigError(f"not a question of fabric kv bench: {error}") from None


def _pages(group: Any, tokens: int) -> int:
    return 1 if isinstance(group, StateGroup) else -(-tokens // group.page_tokens)
