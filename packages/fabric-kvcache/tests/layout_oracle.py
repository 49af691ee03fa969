"""What pools must hold, built the long way: arrays in the layout's order, filled from a logical cache.

Nothing of shard.py or plan.py is used but the data of a layout; the arithmetic here is numpy's own.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import Pages
from fabric_kvcache.cache import CacheLayout, Group, StateGroup
from fabric_kvcache.plan import Chunk, Plan, make_plan
from fabric_kvcache.shard import Shard

Bytes = NDArray[np.uint8]
Key = tuple[str, str, int]
Logical = dict[Key, dict[str, Bytes]]
Tables = list[NDArray[np.int64]]


def keys(group: Group) -> list[Key]:
    return [(type(group).__name__, group.content, layer) for layer in group.layer_numbers]


def logical(src: CacheLayout, tokens: int, rng: np.random.Generator | None) -> Logical:
    """The bytes of a prompt's cache, by layer; all ones without a generator."""

    def make(*shape: int) -> Bytes:
        return np.ones(shape, np.uint8) if rng is None else rng.integers(0, 256, shape, np.uint8)

    made: Logical = {}
    for group in src.groups:
        for key in keys(group):
            if isinstance(group, StateGroup):
                made[key] = {part.name: make(part.units, part.unit_bytes) for part in group.parts}
                continue
            pages = -(-tokens // group.page_tokens)
            scales = make(group.planes, group.units, pages, group.scale_bytes)
            made[key] = {
                "kv": make(group.planes, group.units, tokens, group.unit_bytes),
                "scales": scales[:, :, np.arange(tokens) // group.page_tokens],  # the one that holds for each token
            }
    return made


def mine(units: int, tp: int, rank: int) -> NDArray[np.int64]:
    """The units of a rank."""
    every = np.arange(units)
    return np.split(every, tp)[rank] if units >= tp else np.repeat(every, tp // units)[rank : rank + 1]


def local_layers(layout: CacheLayout, group: Group, pp: int) -> list[int]:
    total = 1 + max(layer for g in layout.groups for layer in g.layer_numbers)
    counts = list(layout.stages) or [total // layout.pp] * layout.pp
    stage = np.split(np.arange(total), np.cumsum(counts)[:-1])[pp]
    return [layer for layer in group.layer_numbers if layer in stage]


def wanted(group: Group, total: int, start: int) -> NDArray[np.int64]:
    """Tokens that a group's pool must get."""
    window = getattr(group, "window", 0)
    return np.arange(max(start, total - window if window else 0), total)


def memory(shard: Shard, content: Logical, tables: Tables, total: int, start: int) -> Bytes:
    """The rank's memory with the tokens from `start` on in its pools; 0 elsewhere."""
    pools = []
    for number, group in enumerate(shard.layout.groups):
        layers = local_layers(shard.layout, group, shard.pp)
        pages = shard.pages[number] if isinstance(shard.pages, tuple) else shard.pages
        stored = [content[key] for key in keys(group) if key[2] in layers]
        build = _state if isinstance(group, StateGroup) else _paged
        pools.append(build(shard, group, stored, pages, tables[number], wanted(group, total, start)))
    return np.concatenate(pools)


def _pad(pages: Bytes, group: Group) -> Bytes:
    """Pages [.., .., bytes] with their padding."""
    missing = max(0, group.page_bytes - pages.shape[-1])
    return np.concatenate([pages, np.zeros((*pages.shape[:2], missing), np.uint8)], axis=2)


def _paged(
    shard: Shard, group: Any, stored: list[dict[str, Bytes]], pages: int, table: Any, tokens: NDArray[np.int64]
) -> Bytes:
    heads = mine(group.units, shard.layout.tp, shard.tp)
    size = group.page_tokens
    extent = {"L": len(stored), "P": pages, "K": group.planes, "H": len(heads), "T": size}
    order, no_tokens = group.letters, group.letters.replace("T", "")
    data = np.zeros([extent[c] for c in order] + [group.unit_bytes], np.uint8)
    scales = np.zeros([extent[c] for c in no_tokens] + [group.scale_bytes], np.uint8)
    data_view = data.transpose([order.index(c) for c in "LPKHT"] + [5])
    scale_view = scales.transpose([no_tokens.index(c) for c in "LPKH"] + [4])
    where = table[tokens // size]
    for number, layer in enumerate(stored):
        data_view[number, where, :, :, tokens % size] = layer["kv"][:, heads][:, :, tokens].transpose(2, 0, 1, 3)
        scale_view[number, where] = layer["scales"][:, heads][:, :, tokens].transpose(2, 0, 1, 3)
    if set(order[:2]) != {"L", "P"}:
        return np.concatenate([data.reshape(-1), scales.reshape(-1)])
    shape = (*data.shape[:2], group.planes * len(heads) * size * group.unit_bytes)
    small = (*data.shape[:2], group.planes * len(heads) * group.scale_bytes)
    if group.scales_at == "page":
        both = np.concatenate([data.reshape(shape), scales.reshape(small)], axis=2)
        return _pad(both, group).reshape(-1)
    return np.concatenate([_pad(data.reshape(shape), group).reshape(-1), scales.reshape(-1)])


def _state(
    shard: Shard, group: Any, stored: list[dict[str, Bytes]], pages: int, table: Any, _tokens: NDArray[np.int64]
) -> Bytes:
    slots = []
    for layer in stored:
        parts = [layer[part.name][mine(part.units, shard.layout.tp, shard.tp)].reshape(-1) for part in group.parts]
        slots.append(np.concatenate(parts))
    width = max(group.page_bytes, len(slots[0]) if slots else 0)
    pool = np.zeros((len(stored), pages, width), np.uint8)
    for number, slot in enumerate(slots):
        pool[number, table[0], : len(slot)] = slot
    return (pool if group.axes == "LP" else pool.transpose(1, 0, 2)).reshape(-1)


def random_tables(layout: CacheLayout, pages: tuple[int, ...], total: int, rng: np.random.Generator) -> Tables:
    """Block tables for a prompt: any pages, some of them neighbours. What a window leaves out is page 0, as in vLLM."""
    tables = []
    for group, pool in zip(layout.groups, pages, strict=True):
        if isinstance(group, StateGroup):
            tables.append(rng.integers(0, pool, 1))
            continue
        count = -(-total // group.page_tokens)
        first = rng.integers(0, pool - count + 1)
        table = np.arange(first, first + count) if rng.random() < 0.5 else rng.permutation(pool)[:count]
        if group.window:
            table[: max(0, total - group.window) // group.page_tokens] = 0
        tables.append(table)
    return tables


def pool_pages(layout: CacheLayout, total: int, spare: int) -> tuple[int, ...]:
    return tuple(spare + 1 if isinstance(g, StateGroup) else spare + -(-total // g.page_tokens) for g in layout.groups)


def ranks(layout: CacheLayout, pages: tuple[int, ...]) -> list[Shard]:
    return [Shard(layout, tp=tp, pp=pp, pages=pages) for pp in range(layout.pp) for tp in range(layout.tp)]


def offsets(pages: Pages, length: int) -> NDArray[np.int64]:
    """Every byte that pages name, as [page, byte]."""
    starts: NDArray[np.int64] = pages.offset + pages.indices.astype(np.int64) * pages.stride
    return starts[:, None] + np.arange(length)


def copy(
    plan: Plan, chunk: Chunk, tables: tuple[Tables, Tables], src: Bytes, dst: Bytes, count: Any, merge: bool
) -> int:
    """Do what a plan says, byte by byte; return the number of writes."""
    moves = plan.moves(chunk, *tables, merge=merge)
    writes = nbytes = 0
    for layer in moves.layers:
        for length, a, b in moves.at(layer):
            where = offsets(b, length)
            dst[where] = src[offsets(a, length)]
            np.add.at(count, where, 1)
            writes += len(a)
            nbytes += length * len(a)
    assert (moves.writes, moves.nbytes) == (writes, nbytes)
    assert plan.nbytes(chunk) == nbytes
    assert plan.writes(chunk) == writes if not merge else plan.writes(chunk) >= writes
    return writes


def check(
    src: CacheLayout, dst: CacheLayout, chunks: list[Chunk], seed: int, *, spare: int = 2, merge: bool = True
) -> dict[tuple[int, int], int]:
    """Move a prompt from every source rank to every destination rank, and compare with pools built directly.

    Returns the writes of each (source rank, destination rank).
    """
    rng = np.random.default_rng(seed)
    total, start = chunks[-1].total, chunks[-1].start
    content = logical(src, total, rng)
    ones = logical(src, total, None)
    src_pages, dst_pages = pool_pages(src, total, spare), pool_pages(dst, total, spare)
    tables = random_tables(src, src_pages, total, rng), random_tables(dst, dst_pages, total, rng)
    senders = [(shard, memory(shard, content, tables[0], total, 0)) for shard in ranks(src, src_pages)]
    for shard, octets in senders:
        assert shard.nbytes == len(octets)
    writes = {}
    for b, target in enumerate(ranks(dst, dst_pages)):
        expected = memory(target, content, tables[1], total, start)
        mask = memory(target, ones, tables[1], total, start)
        before = rng.integers(0, 256, len(expected), np.uint8)
        got, count = before.copy(), np.zeros(len(expected), np.int64)
        for a, (shard, octets) in enumerate(senders):
            plan = make_plan(shard, target, seed=seed)
            writes[a, b] = sum(copy(plan, chunk, tables, octets, got, count, merge) for chunk in chunks)
        assert np.array_equal(count, mask), "a byte was written twice, or not at all, or should not have been"
        assert np.array_equal(got, np.where(mask == 1, expected, before)), "a byte has a wrong value"
    return writes


def chunks_of(total: int, start: int, cuts: list[int]) -> list[Chunk]:
    marks = [start, *sorted({cut for cut in cuts if start < cut < total}), total]
    return [Chunk(a, b, total, start) for a, b in itertools.pairwise(marks)]
