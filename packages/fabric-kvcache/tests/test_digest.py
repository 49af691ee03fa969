"""Digests: the same whatever the layouts, and of everything that must be the same, and of nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layout_oracle import Bytes, Tables, logical, memory, pool_pages, random_tables, ranks
from layout_strategies import pairs

from fabric_core import BadRange
from fabric_kvcache.cache import AttentionGroup, CacheLayout
from fabric_kvcache.digest import Difference, Key, add, differences, digest_held, digest_sent, digests
from fabric_kvcache.plan import make_plan
from fabric_kvcache.shard import Shard


class Pair:
    """A prompt's cache on both sides, each built from the logical one."""

    def __init__(self, src: CacheLayout, dst: CacheLayout, total: int, start: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.total, self.start, self.seed = total, start, seed
        content, ones = logical(src, total, rng), logical(src, total, None)
        pages = pool_pages(src, total, 2), pool_pages(dst, total, 2)
        self.src_tables, self.dst_tables = (
            random_tables(layout, count, total, rng) for layout, count in zip((src, dst), pages, strict=True)
        )
        self.src = [(rank, memory(rank, content, self.src_tables, total, 0)) for rank in ranks(src, pages[0])]
        self.dst: list[tuple[Shard, Bytes, Bytes]] = []
        for rank in ranks(dst, pages[1]):
            mask = memory(rank, ones, self.dst_tables, total, start)
            expected = memory(rank, content, self.dst_tables, total, start)
            noise = rng.integers(0, 256, len(expected), np.uint8)
            self.dst.append((rank, np.where(mask == 1, expected, noise), mask))

    def sent(self, rank: Shard) -> int:
        every = (
            digest_sent(make_plan(a, rank, seed=self.seed), octets, self.src_tables, self.total, self.start)
            for a, octets in self.src
        )
        return add(*every)

    def held(self, rank: Shard, octets: Bytes) -> int:
        return digest_held(rank, octets, self.dst_tables, self.total, self.start)


cases = st.tuples(pairs(), st.integers(1, 50), st.integers(0, 99), st.booleans())


def build(case: Any) -> Pair:
    (src, dst), total, seed, hit = case
    start = 0
    if hit:  # what the destination has ends at a page of every group
        sizes = [group.page_tokens for group in dst.groups if hasattr(group, "page_tokens")]
        page = int(np.lcm.reduce(sizes)) if sizes else 1
        start = (total - 1) // page * page
    return Pair(src, dst, total, start, seed)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_what_all_source_ranks_send_adds_up_to_what_each_destination_rank_holds(case: Any) -> None:
    pair = build(case)
    for rank, octets, _mask in pair.dst:
        assert pair.held(rank, octets) == pair.sent(rank)


@settings(max_examples=60, deadline=None)
@given(cases, st.data())
def test_any_wanted_byte_changes_it_and_no_other_byte_does(case: Any, data: Any) -> None:
    pair = build(case)
    rank, octets, mask = pair.dst[data.draw(st.integers(0, len(pair.dst) - 1))]
    before = pair.held(rank, octets)
    for wanted in (True, False):
        places = np.flatnonzero((mask == 1) == wanted)
        if len(places):
            at = int(places[data.draw(st.integers(0, len(places) - 1))])
            octets[at] ^= 1 << data.draw(st.integers(0, 7))
            after = pair.held(rank, octets)
            assert (after != before) == wanted
            before = after


LAYOUT = CacheLayout(
    groups=(AttentionGroup(layers=3, kv_heads=4, head_dim=8, page_tokens=16, dtype="bfloat16", axes="page-NHD"),), tp=2
)
OTHER = CacheLayout(
    groups=(AttentionGroup(layers=3, kv_heads=4, head_dim=8, page_tokens=8, dtype="bfloat16", axes="separate-HND"),),
    tp=4,
)


def every(side: list[Any], tables: Tables, total: int, start: int = 0) -> dict[Key, Any]:
    found: dict[Key, Any] = {}
    for rank, octets, *_ in side:
        found |= digests(rank, octets, tables, total, start)
    return found


def test_a_difference_is_named_by_layer_head_and_tokens() -> None:
    pair = Pair(LAYOUT, OTHER, 100, 0, seed=3)
    here = every(pair.src, pair.src_tables, 100)
    assert len(here) == 3 * 4
    assert list(differences(here, every(pair.dst, pair.dst_tables, 100))) == []
    rank, octets, _mask = pair.dst[3]  # holds head 3
    field = rank.fields(0)[0]
    for token in (40, 41, 42, 90):
        page = int(pair.dst_tables[0][token // 8])
        octets[field.base + 2 * field.layer + field.plane + page * field.page + token % 8 * field.token + 5] ^= 0x80
    key = Key("attention", "", 2, "kv", 3)
    found = list(differences(here, every(pair.dst, pair.dst_tables, 100)))
    assert found == [Difference(key, 40, 43), Difference(key, 90, 91)]
    assert str(found[0]) == "layer 2 attention head 3, tokens 40 to 42"
    assert str(found[1]).endswith("token 90")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), st.integers(0, 99))
def test_tokens_that_change_places_are_seen(a: int, b: int) -> None:
    assume(a != b)
    pair = Pair(LAYOUT, OTHER, 100, 0, seed=3)
    rank, octets, _mask = pair.dst[0]
    before = pair.held(rank, octets)
    pages = pair.dst_tables[0]
    field = rank.fields(0)[0]
    view = np.lib.stride_tricks.as_strided(
        octets[field.base :], (rank.pool_pages[0], 8, 2, 16), (field.page, field.token, field.plane, 1)
    )
    x, y = (int(pages[a // 8]), a % 8), (int(pages[b // 8]), b % 8)
    view[x], view[y] = view[y].copy(), view[x].copy()
    assert pair.held(rank, octets) != before


def test_parts_add_up() -> None:
    pair = Pair(LAYOUT, OTHER, 100, 0, seed=5)
    rank, octets, _mask = pair.dst[1]
    parts = [digest_held(rank, octets, pair.dst_tables, end, start) for start, end in ((0, 33), (33, 34), (34, 100))]
    assert add(*parts) == pair.held(rank, octets)
    rows = digests(rank, octets, pair.dst_tables, 100)
    assert add(*(int(row.sum(dtype=np.uint64)) for row in rows.values())) == pair.held(rank, octets)


def test_numbers_do_not_depend_on_how_much_is_gathered_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(LAYOUT, OTHER, 100, 0, seed=5)
    rank, octets, _mask = pair.dst[1]
    before = pair.held(rank, octets)
    monkeypatch.setattr("fabric_kvcache.digest._SLICE", 100)
    assert pair.held(rank, octets) == before


def test_the_numbers_are_what_they_were() -> None:
    """Both sides of a fleet that is being updated must agree: a change here is a change of what is exchanged."""
    layout = CacheLayout(groups=(AttentionGroup(layers=1, kv_heads=1, head_dim=4, page_tokens=4, dtype="float16"),))
    octets = np.arange(Shard(layout, pages=2).nbytes, dtype=np.uint8)
    assert digest_held(Shard(layout, pages=2), octets, [[1, 0]], 6) == 429083177944584467


def test_what_makes_no_sense_is_refused() -> None:
    shard = Shard(LAYOUT, pages=4)
    octets = bytes(shard.nbytes)
    with pytest.raises(BadRange, match="2 pages, but token 39 lies in page 2"):
        digest_held(shard, octets, [[0, 1]], 40)
    with pytest.raises(BadRange, match="pages 0 to 4 of a pool of 4"):
        digest_held(shard, octets, [[0, 4]], 20)
    with pytest.raises(BadRange, match="must be 0 <= start < total"):
        digest_held(shard, octets, [[0, 1]], 20, 20)
    with pytest.raises(BadRange, match="bytes: the pools"):
        digest_held(shard, octets[:-1], [[0, 1]], 20)
