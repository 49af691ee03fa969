"""The worker halves: every block arrives, whoever is first, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from vllm_fakes import LIMIT, cache_of, fill, until, words_of
from vllm_pair import D_BLOCKS, P_BLOCKS, TOTAL, Ranks, advance, asked, held, load, opening, pair, same, settle

from fabric_kvcache.vllm.params import Recv
from fabric_kvcache.vllm.steps import Load


@pytest.fixture
def open_rank() -> Iterator[Ranks]:
    with opening() as one:
        yield one


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_chunks_of_a_prompt_whenever_its_decoder_asks(open_rank: Ranks, when: str) -> None:
    """Each layer has its content only when it is computed: what goes earlier is poison, and is seen."""
    p, d = pair(open_rank)

    def ask() -> None:
        d.step(loads=[load([p], D_BLOCKS, TOTAL)])
        asked(p)

    def compute(blocks: list[int]) -> Callable[[int], None]:
        return lambda layer: fill([p.caches[layer]], blocks, salt=layer)

    if when == "before":
        ask()
    # The second block is half full after the first step, and other words are in it after the second.
    p.step(advance([5, 2], 0, 6, TOTAL), compute=lambda layer: fill([p.caches[layer]], [5, 2], salt=9 + layer))
    if when == "between":
        ask()
    p.step(advance(P_BLOCKS, 6, TOTAL, TOTAL), compute=compute([2, 9]))
    p.step(**held())
    if when == "after":
        assert not p.sent
        ask()
    settle(p, d)
    assert not d.failed
    same(p, d, P_BLOCKS, D_BLOCKS)
    nbytes, _writes, seconds = d.said.received["d-t"]
    assert nbytes == p.said.sent["p-t"][0] == 3 * 3 * 2 * 4 * 8 * 2  # layers, blocks, heads, tokens, content, bytes
    assert seconds > 0


def test_a_layer_goes_before_the_next_is_computed(open_rank: Ranks) -> None:
    p, d = pair(open_rank)
    d.step(loads=[load([p], D_BLOCKS, TOTAL)])
    asked(p)

    def compute(layer: int) -> None:
        fill([p.caches[layer]], P_BLOCKS)
        if layer:
            before = p.caches[layer - 1].tensor.words[5]
            until(lambda: np.array_equal(d.caches[layer - 1].tensor.words[7], before))

    p.step(advance(P_BLOCKS, 0, TOTAL, TOTAL), compute=compute)
    p.step(**held())
    settle(p, d)
    assert not d.failed


def test_prefixes_that_either_side_has(open_rank: Ranks) -> None:
    p, d = pair(open_rank)
    fill(p.caches, P_BLOCKS)
    # The prefiller has eight tokens in its cache, the decoder four.
    d.step(loads=[load([p], D_BLOCKS, TOTAL, start=4)])
    asked(p)
    p.step(advance(P_BLOCKS, 8, TOTAL, TOTAL))
    p.step(**held())
    settle(p, d)
    same(p, d, P_BLOCKS[1:], D_BLOCKS[1:])


def test_a_preempted_prompt_goes_on_from_other_blocks(open_rank: Ranks) -> None:
    p, d = pair(open_rank)
    d.step(loads=[load([p], D_BLOCKS, TOTAL)])
    asked(p)
    p.step(advance([5, 2], 0, 6, TOTAL), compute=lambda layer: fill([p.caches[layer]], [5, 2]))
    p.step(preempted={"p-t"})
    first = words_of(p.caches)[:, 5]
    fill(p.caches, [5, 2], salt=3)  # another request's
    other = [3, 8, 6]
    for cache, words in zip(p.caches, first, strict=True):
        cache.tensor.words[3] = words
    p.step(
        advance(other, 0, TOTAL, TOTAL, moved=True), compute=lambda layer: fill([p.caches[layer]], [8, 6], salt=layer)
    )
    p.step(**held())
    settle(p, d)
    assert not d.failed
    same(p, d, other, D_BLOCKS)


def test_several_prompts_in_one_step(open_rank: Ranks) -> None:
    p, d = pair(open_rank)
    d.step(loads=[load([p], [1, 2], 8, name="a"), load([p], [3, 4], 7, name="b")])
    sends = p.worker.sends
    assert sends is not None
    until(lambda: sends._prefiller.asked == {"a", "b"})
    p.step(
        advance([4, 3], 0, 8, 8, name="a"),
        advance([2, 1], 0, 7, 7, name="b"),
        compute=lambda layer: fill([p.caches[layer]], range(12)),
    )
    p.step(held={"p-a": ("a", LIMIT), "p-b": ("b", LIMIT)})
    settle(p, d, "a")
    settle(p, d, "b")
    same(p, d, [4, 3, 2, 1], [1, 2, 3, 4])


def test_a_decoder_that_gives_up_gets_its_blocks_back(open_rank: Ranks) -> None:
    p, d = pair(open_rank)
    d.step(loads=[load([p], D_BLOCKS, TOTAL)])
    asked(p)
    p.step(advance([5, 2], 0, 6, TOTAL), compute=lambda layer: fill([p.caches[layer]], [5, 2]))
    d.step(cancelled={"d-t"})

    def safe() -> bool:
        d.poll()
        return "d-t" in d.ended and d.said.unsafe == d.said.safe

    until(safe)
    assert d.failed == {"d-t"}
    before = words_of(d.caches)
    p.step(advance(P_BLOCKS, 6, TOTAL, TOTAL), compute=lambda layer: fill([p.caches[layer]], P_BLOCKS, salt=5))
    p.step(**held())
    until(lambda: (p.poll(), "p-t" in p.sent)[1])
    assert np.array_equal(words_of(d.caches), before), "a write has landed after it was said to be safe"


def test_a_decoder_that_gives_up_before_its_prompt_begins(open_rank: Ranks) -> None:
    p, d = pair(open_rank)
    d.step(loads=[load([p], D_BLOCKS, TOTAL)])
    asked(p)
    d.step(cancelled={"d-t"})
    until(lambda: (d.poll(), d.said.unsafe == d.said.safe)[1])
    assert d.failed == {"d-t"}
    p.step(advance(P_BLOCKS, 0, TOTAL, TOTAL))
    p.step(**held())
    assert p.sent == {"p-t"}, "its blocks wait for nobody"


def test_a_prefill_that_is_aborted_ends_at_its_decoder(open_rank: Ranks) -> None:
    p, d = pair(open_rank)
    d.step(loads=[load([p], D_BLOCKS, TOTAL)])
    asked(p)
    p.step(advance([5, 2], 0, 6, TOTAL))
    p.step(dropped={"p-t": ("t", "the client has left")})
    settle(p, d)
    assert d.failed == {"d-t"}
    assert "the client has left" in d.said.reasons["d-t"]
    # Who asks only afterwards is told at once, too.
    p.step(dropped={"p-u": ("u", "it was never scheduled")})
    assert "p-u" in p.sent
    d.step(loads=[load([p], D_BLOCKS, TOTAL, name="u")])
    until(lambda: (p.poll(), d.poll(), "d-u" in d.ended)[2])
    assert "it was never scheduled" in d.said.reasons["d-u"]


def test_blocks_that_nobody_asks_for_come_back(open_rank: Ranks) -> None:
    p, d = pair(open_rank)
    p.step(advance(P_BLOCKS, 0, TOTAL, TOTAL))
    p.step(held={"p-t": ("t", 0.01)})
    until(lambda: (p.poll(), "p-t" in p.sent)[1])
    d.step(loads=[load([p], D_BLOCKS, TOTAL)])
    until(lambda: (p.poll(), d.poll(), "d-t" in d.ended)[2])
    assert "no decoder has asked for it in time" in d.said.reasons["d-t"]


def test_prompts_of_different_lengths_are_refused(open_rank: Ranks) -> None:
    p, d = pair(open_rank)
    d.step(loads=[load([p], D_BLOCKS, TOTAL)])
    asked(p)
    p.step(advance([5, 2], 0, 8, 8))
    until(lambda: (p.poll(), d.poll(), "d-t" in d.ended)[2])
    assert "both must be given the same prompt" in d.said.reasons["d-t"]


def test_a_prefiller_that_never_comes_ends_at_the_deadline(open_rank: Ranks) -> None:
    p, d = pair(open_rank, timeout=0.05)
    d.step(loads=[load([p], D_BLOCKS, TOTAL)])
    until(lambda: (d.poll(), "d-t" in d.ended)[1])
    assert d.failed == {"d-t"}
    nobody = Load("d-n", Recv("n", host="127.0.0.1", port=9), (D_BLOCKS,), 0, TOTAL)
    d.step(loads=[nobody])
    until(lambda: (d.poll(), "d-n" in d.ended)[1])
    assert "is the engine up" in d.said.reasons["d-n"] or "in time" in d.said.reasons["d-n"]


def test_engines_that_do_both(open_rank: Ranks) -> None:
    a, b = (open_rank(cache_of(), role="both", packing="cpu-vec") for _ in range(2))
    for salt, (p, d, name) in enumerate([(a, b, "x"), (b, a, "y")]):
        fill(p.caches, P_BLOCKS, salt=salt)
        d.step(loads=[load([p], D_BLOCKS, TOTAL, name=name)])
        p.step(advance(P_BLOCKS, 0, TOTAL, TOTAL, name=name))
        p.step(**held(name))
        settle(p, d, name)
        assert not d.failed
        for mine, yours in zip(P_BLOCKS, D_BLOCKS, strict=True):
            assert np.array_equal(words_of(p.caches)[:, mine], words_of(d.caches)[:, yours])


@pytest.mark.parametrize("silent", [(1,), (0, 1, 2)])
def test_layers_without_a_hook_go_at_the_end_of_the_pass(open_rank: Ranks, silent: tuple[int, ...]) -> None:
    p, d = pair(open_rank)
    d.step(loads=[load([p], D_BLOCKS, TOTAL)])
    asked(p)
    p.step(advance([5, 2], 0, 6, TOTAL), compute=lambda layer: fill([p.caches[layer]], [5, 2]), silent=silent)
    p.step(advance(P_BLOCKS, 6, TOTAL, TOTAL), compute=lambda layer: fill([p.caches[layer]], [2, 9]), silent=silent)
    p.step(**held())
    settle(p, d)
    assert not d.failed
    same(p, d, P_BLOCKS, D_BLOCKS)
