"""Blocks inside which keys are transposed, moved in tokens: pairs whose blocks differ in size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllm_fakes import POISON, cache_of, until
from vllm_pair import Rank, Ranks, advance, asked, held, load, opening, settle

from fabric_core import ConfigError
from fabric_kvcache.vllm.caches import LayerCache, describe
from fabric_kvcache.vllm.options import Options

DIM = 4
TOTAL = 22


@pytest.fixture
def open_rank() -> Iterator[Ranks]:
    with opening() as one:
        yield one


def tokens_of(caches: Sequence[LayerCache], blocks: Sequence[int]) -> NDArray[Any]:
    """Return `[layer, head, token, K or V, dim]` as vLLM's attention reads these blocks: the oracle, by itself."""
    layers = []
    for cache in caches:
        _blocks, heads, size, content = cache.tensor.shape
        found = []
        for block in blocks:
            flat = cache.tensor.words[block].reshape(heads, 2, size * content // 2)
            keys = flat[:, 0].reshape(heads, content // 2, size).transpose(0, 2, 1)
            found.append(np.stack([keys, flat[:, 1].reshape(heads, size, content // 2)], axis=2))
        layers.append(np.concatenate(found, axis=1))
    return np.stack(layers)


def compute(caches: Sequence[LayerCache], blocks: Sequence[int], first: int, end: int, layer: int) -> None:
    """Write tokens `first` to `end`, each word with a value of its own."""
    cache = caches[layer]
    _blocks, heads, size, content = cache.tensor.shape
    dim = content // 2
    for token in range(first, end):
        flat = cache.tensor.words[blocks[token // size]].reshape(heads, 2, size * dim)
        for head in range(heads):
            value = 1 + 1000 * layer + 500 * head + token * 2 * dim + np.arange(2 * dim)
            flat[head, 0].reshape(dim, size)[:, token % size] = value[:dim]
            flat[head, 1].reshape(size, dim)[token % size] = value[dim:]


def a_pair(open_rank: Ranks, left: int, right: int, **more: Any) -> tuple[Rank, Rank]:
    p, d = (
        open_rank(cache_of(tokens=size, content=2 * DIM, **more), role=role, packing="cpu-vec", pieces="tokens")
        for role, size in (("p", left), ("d", right))
    )
    return p, d


@pytest.mark.parametrize(("left", "right"), [(4, 8), (8, 4), (4, 4)])
@pytest.mark.parametrize("when", ["before", "after"])
def test_blocks_of_other_sizes(open_rank: Ranks, left: int, right: int, when: str) -> None:
    """The decoder has its first eight tokens; chunks end within blocks of either side."""
    p, d = a_pair(open_rank, left, right)
    mine, yours = [5, 2, 9, 0, 7, 3], [7, 1, 4, 8, 6, 2]

    def ask() -> None:
        d.step(loads=[load([p], yours[: -(-TOTAL // right)], TOTAL, start=8)])
        asked(p)

    if when == "before":
        ask()
    for first, end in ((0, 6), (6, 17), (17, TOTAL)):
        blocks = mine[: -(-end // left)]
        p.step(
            advance(blocks, first, end, TOTAL),
            compute=lambda layer, b=blocks, f=first, e=end: compute(p.caches, b, f, e, layer),
        )
    p.step(**held())
    if when == "after":
        ask()
    settle(p, d)
    assert not d.failed, d.said.reasons
    here, there = tokens_of(p.caches, mine), tokens_of(d.caches, yours)
    assert np.array_equal(here[:, :, 8:TOTAL], there[:, :, 8:TOTAL])
    assert (there[:, :, :8] == POISON).all(), "it has these itself"
    assert (there[:, :, TOTAL:] == POISON).all(), "what is behind the prompt does not move"
    assert (tokens_of(d.caches, [block for block in range(12) if block not in yours]) == POISON).all()
    assert d.said.received["d-t"][0] == 3 * 2 * (TOTAL - 8) * 2 * DIM * 2  # layers, heads, tokens, K and V, bytes


def test_a_window_moves_its_last_tokens(open_rank: Ranks) -> None:
    p, d = a_pair(open_rank, 4, 8, window=5)
    compute(p.caches, [5, 2, 9, 3], 0, 16, 0)
    d.step(loads=[load([p], [0, 4], 16)])
    p.step(advance([0, 0, 9, 3], 0, 16, 16))
    p.step(**held())
    settle(p, d)
    assert not d.failed
    here, there = tokens_of(p.caches, [9, 3]), tokens_of(d.caches, [4])
    assert np.array_equal(here[:, :, -4:], there[:, :, -4:])
    assert (tokens_of(d.caches, [0]) == POISON).all(), "a block that vLLM keeps for what is outside the window"


def test_sides_that_move_other_pieces_are_refused(open_rank: Ranks) -> None:
    p = open_rank(cache_of(), role="p", packing="cpu-vec", pieces="tokens")
    d = open_rank(cache_of(), role="d", packing="cpu-vec")
    d.step(loads=[load([p], [7, 1], 8)])
    p.step(advance([5, 2], 0, 8, 8))
    until(lambda: (p.poll(), d.poll(), "d-t" in d.ended)[2])
    assert d.failed == {"d-t"}


@pytest.mark.parametrize(
    ("packing", "tp", "shape", "says"),
    [
        ("cpu-amx", 1, {}, "cpu-amx inside"),
        ("cpu-vec", 2, {"of_model": 4}, "tensor parallelism of 2"),
        ("cpu-vec", 1, {"content": 6}, "even number"),
        ("cpu-vec", 1, {"heads": 33}, "32 heads"),
        ("cpu-vec", 1, {"layers": 20, "heads": 20, "content": 256}, "51600 writes"),
        ("cpu-vec", 1, {"order": "BLHN"}, "heads behind heads"),
    ],
)
def test_what_cannot_be_moved_in_tokens_is_refused(packing: str, tp: int, shape: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        describe(cache_of(**shape), tp=tp, rank=0, packing=packing, pieces="tokens")


def test_the_option_is_checked() -> None:
    assert Options.of({"pieces": "tokens"}).pieces == "tokens"
    with pytest.raises(ConfigError, match="pieces"):
        Options.of({"pieces": "words"})
