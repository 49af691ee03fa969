"""Sizes, offsets, and the way in and out of pages."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fabric_core import BadRange, ConfigError
from fabric_kvcache.layout import ITEM_BYTES, KvLayout, pack, unpack

layouts = st.builds(
    KvLayout,
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([1, 3, 8, 64]),
    page_tokens=st.sampled_from([1, 2, 7, 16]),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
)


def words(layout: KvLayout, tokens: int, seed: int) -> NDArray[Any]:
    shape = (2, layout.kv_heads, tokens, layout.head_dim)
    return np.random.default_rng(seed).integers(1, 1 << 8 * layout.item_bytes, size=shape).astype(layout.word)


@given(layouts, st.integers(1, 9))
def test_the_pages_of_a_pool_tile_it_without_gap_or_overlap(layout: KvLayout, pages: int) -> None:
    starts = [layout.page_offset(layer, page, pages) for layer in range(layout.layers) for page in range(pages)]
    assert starts == [k * layout.page_bytes for k in range(layout.layers * pages)]
    assert layout.pool_bytes(pages) == len(starts) * layout.page_bytes
    assert layout.page_bytes * layout.layers == layout.token_bytes * layout.page_tokens


@given(layouts, st.data())
def test_any_run_of_heads_is_one_piece_of_a_page_with_its_keys_and_values(layout: KvLayout, data: Any) -> None:
    first = data.draw(st.integers(0, layout.kv_heads - 1))
    count = data.draw(st.integers(1, layout.kv_heads - first))
    view = layout.view(bytearray(layout.pool_bytes(2)), 2)
    view[-1, 1, first : first + count] = 1
    marked = np.flatnonzero(view.reshape(-1)) * layout.item_bytes
    offset, nbytes = layout.head_range(first, count)
    start = layout.page_offset(layout.layers - 1, 1, 2) + offset
    assert marked[0] == start
    assert len(marked) * layout.item_bytes == nbytes == marked[-1] - marked[0] + layout.item_bytes


@given(layouts, st.integers(0, 100))
def test_pages_hold_all_tokens_and_no_page_is_spare(layout: KvLayout, tokens: int) -> None:
    pages = layout.pages_for(tokens)
    assert pages * layout.page_tokens >= tokens > (pages - 1) * layout.page_tokens or tokens == pages == 0


@given(layouts, st.integers(1, 40), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_what_is_packed_comes_out_again_from_any_pages(layout: KvLayout, tokens: int, spare: int, seed: int) -> None:
    count = layout.pages_for(tokens)
    pages = np.random.default_rng(seed).permutation(count + spare)[:count].astype(np.uint32)
    keys, values = words(layout, tokens, seed)
    memory = bytearray(b"\xee" * layout.pool_bytes(count + spare))
    view = layout.view(memory, count + spare)
    pack(view[0], pages, keys, values)
    got_keys, got_values = unpack(view[0], pages, tokens)
    assert np.array_equal(got_keys, keys)
    assert np.array_equal(got_values, values)
    assert got_keys.flags.c_contiguous
    others = np.setdiff1d(np.arange(count + spare), pages)
    assert (layout.view(memory, count + spare).view(np.uint8)[0, others] == 0xEE).all(), "another page was touched"


@given(layouts, st.integers(1, 30), st.lists(st.integers(0, 30)), st.integers(0, 2**32 - 1))
def test_chunks_that_end_anywhere_make_the_same_pages(
    layout: KvLayout, tokens: int, cuts: list[int], seed: int
) -> None:
    count, size = layout.pages_for(tokens), layout.page_tokens
    pages = np.arange(count, dtype=np.uint32)
    keys, values = words(layout, tokens, seed)
    whole, pieces = (layout.view(bytearray(layout.pool_bytes(count)), count)[0] for _ in range(2))
    pack(whole, pages, keys, values)
    marks = sorted({0, tokens, *(cut for cut in cuts if cut < tokens)})
    chunks = list(itertools.pairwise(marks))
    np.random.default_rng(seed).shuffle(chunks)
    for first, end in chunks:
        pack(pieces, pages[first // size : -(-end // size)], keys[:, first:end], values[:, first:end], first % size)
    assert np.array_equal(whole, pieces)


def test_the_rest_of_the_last_page_stays_as_it_was() -> None:
    layout = KvLayout(1, 2, 4, 8)
    memory = bytearray(b"\xff" * layout.pool_bytes(1))
    view = layout.view(memory, 1)
    keys, values = words(layout, 3, 0)
    pack(view[0], np.array([0]), keys, values)
    assert (view[0, 0, :, :, 3:].view(np.uint8) == 0xFF).all()


def test_a_layout_goes_over_the_wire_as_it_is() -> None:
    layout = KvLayout(30, 3, 64, 16, "bfloat16")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KvLayout) == layout
    assert str(layout) == "30 layers x 3 KV heads x 64, 16 tokens a page, bfloat16"


@pytest.mark.parametrize(
    "wrong",
    [{"layers": 0}, {"kv_heads": -1}, {"head_dim": 5000}, {"page_tokens": 1.5}, {"dtype": "int4"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_layout_that_makes_no_sense_names_the_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        KvLayout(**{"layers": 1, "kv_heads": 1, "head_dim": 8, "page_tokens": 8, **wrong})


def test_what_is_outside_of_the_cache_is_refused() -> None:
    layout = KvLayout(2, 3, 8, 4)
    view = layout.view(bytearray(layout.pool_bytes(2)), 2)
    keys = np.zeros((3, 5, 8), dtype=layout.word)
    for call in (
        lambda: layout.layer_offset(2, 2),
        lambda: layout.page_offset(0, 2, 2),
        lambda: layout.head_range(2, 2),
        lambda: pack(view[0], np.array([0]), keys, keys),
        lambda: pack(view[0], np.array([0, 1]), keys[:2], keys[:2]),
        lambda: pack(view[0], np.array([0, 1]), keys, keys, 4),
        lambda: pack(view[0], np.array([0, 1]), keys[:, :4], keys[:, :4]),
        lambda: unpack(view[0], np.array([0]), 5),
    ):
        with pytest.raises(BadRange):
            call()
