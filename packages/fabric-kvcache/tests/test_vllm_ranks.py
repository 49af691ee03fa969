"""Pairs of engines that differ: degrees of tensor parallelism, block sizes, windows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from vllm_fakes import POISON, cache_of, fill, until, words_of
from vllm_pair import D_BLOCKS, P_BLOCKS, TOTAL, Ranks, advance, held, load, opening, same, settle

from fabric_kvcache.vllm.card import Card, CardServer
from fabric_kvcache.vllm.params import Recv
from fabric_kvcache.vllm.steps import Load


@pytest.fixture
def open_rank() -> Iterator[Ranks]:
    with opening() as one:
        yield one


@pytest.mark.parametrize("packing", ["cpu-vec", ""])
@pytest.mark.parametrize(("left", "right"), [(2, 1), (1, 2), (4, 2)])
def test_ranks_that_differ(open_rank: Ranks, packing: str, left: int, right: int) -> None:
    """Four heads in all; with four ranks each has one."""
    heads = 4
    ps = [
        open_rank(cache_of(heads=heads // left, of_model=heads), role="p", tp=left, rank=rank, packing=packing)
        for rank in range(left)
    ]
    ds = [
        open_rank(cache_of(heads=heads // right, of_model=heads), role="d", tp=right, rank=rank, packing=packing)
        for rank in range(right)
    ]
    for number, p in enumerate(ps):
        fill(p.caches, P_BLOCKS, salt=number)
    for d in ds:
        d.step(loads=[load(ps, D_BLOCKS, TOTAL)])
    for p in ps:
        p.step(advance(P_BLOCKS, 0, TOTAL, TOTAL))
        p.step(**held())
    for d in ds:
        until(lambda d=d: ([p.poll() for p in ps], d.poll(), "d-t" in d.ended)[2])  # type: ignore[misc]
        assert not d.failed
    here = np.concatenate([words_of(p.caches) for p in ps], axis=2)[:, P_BLOCKS]
    there = np.concatenate([words_of(d.caches) for d in ds], axis=2)[:, D_BLOCKS]
    if not packing:  # what is behind the prompt in its last block does not move
        here, there = here.copy(), there.copy()
        assert (there[:, -1, :, TOTAL % 4 :] == POISON).all()
        here[:, -1, :, TOTAL % 4 :] = there[:, -1, :, TOTAL % 4 :] = 0
    assert np.array_equal(here, there)


def test_blocks_of_other_sizes_where_tokens_move(open_rank: Ranks) -> None:
    p = open_rank(cache_of(tokens=4, order="LBNH"), role="p")
    d = open_rank(cache_of(tokens=8, order="LBHN"), role="d")
    fill(p.caches, P_BLOCKS)
    d.step(loads=[load([p], [7, 1], TOTAL)])
    p.step(advance(P_BLOCKS, 0, TOTAL, TOTAL))
    p.step(**held())
    settle(p, d)
    assert not d.failed
    here = np.concatenate([words_of(p.caches)[:, block] for block in P_BLOCKS], axis=2)[:, :, :TOTAL]
    there = np.concatenate([words_of(d.caches)[:, block] for block in [7, 1]], axis=2)[:, :, :TOTAL]
    assert np.array_equal(here, there)


def test_blocks_of_other_sizes_are_refused_where_blocks_move(open_rank: Ranks) -> None:
    p = open_rank(cache_of(tokens=4), role="p", packing="cpu-vec")
    d = open_rank(cache_of(tokens=8), role="d", packing="cpu-vec")
    server = CardServer(
        "127.0.0.1",
        0,
        lambda host, port: Card(
            engine="e", addresses=(p.worker.address,), host=host, port=port, granule=4, packing="cpu-vec"
        ),
    )
    try:
        d.step(loads=[Load("d-t", Recv("t", host="127.0.0.1", port=server.port), ([7, 1],), 0, TOTAL)])
        until(lambda: (d.poll(), "d-t" in d.ended)[1])
    finally:
        server.close()
    assert "blocks of 4 tokens (cpu-vec) and this engine blocks of 8 tokens" in d.said.reasons["d-t"]


def test_a_sliding_window_moves_its_last_blocks_only(open_rank: Ranks) -> None:
    p = open_rank(cache_of(window=4), role="p", packing="cpu-vec")
    d = open_rank(cache_of(window=4), role="d", packing="cpu-vec")
    fill(p.caches, [5, 2, 9])
    d.step(loads=[load([p], [0, 0, 1, 4], 16)])  # 0: vLLM's block for what is outside the window
    p.step(advance([0, 3, 2, 9], 0, 16, 16))
    p.step(**held())
    settle(p, d)
    assert not d.failed
    same(p, d, [2, 9], [1, 4])


def test_latent_vectors_move_by_tokens(open_rank: Ranks) -> None:
    """Also between blocks of other sizes; what is behind the prompt in its last block stays."""
    p, d = (
        open_rank(cache_of(tokens=size, heads=1, content=9, latent=True), role=role)
        for role, size in (("p", 4), ("d", 8))
    )
    fill(p.caches, P_BLOCKS)
    d.step(loads=[load([p], [7, 1], TOTAL)])
    p.step(advance(P_BLOCKS, 0, TOTAL, TOTAL))
    p.step(**held())
    settle(p, d)
    assert not d.failed
    here = np.concatenate([words_of(p.caches)[:, block] for block in P_BLOCKS], axis=2)
    there = np.concatenate([words_of(d.caches)[:, block] for block in [7, 1]], axis=2)
    assert np.array_equal(here[:, :, :TOTAL], there[:, :, :TOTAL])
    assert (there[:, :, TOTAL:] == POISON).all()
