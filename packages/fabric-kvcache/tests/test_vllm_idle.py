"""Steps in which nothing is computed: on processors a worker waits in them, and does not ask to be called again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NoReturn

import pytest
from vllm_fakes import LIMIT, fill, scheduled
from vllm_halves import half
from vllm_pair import D_BLOCKS, P_BLOCKS, TOTAL, Ranks, advance, asked, held, load, opening, pair, same, settle

from fabric_kvcache.vllm import worker


@pytest.fixture
def open_rank() -> Iterator[Ranks]:
    with opening() as one:
        yield one


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle step waits until something comes, or the test fails."""
    monkeypatch.setattr(worker, "_IDLE_STEP", LIMIT)


def test_a_decoder_waits_in_one_step_until_its_prompt_is_there(open_rank: Ranks, long: None) -> None:
    p, d = pair(open_rank)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(d.step, loads=[load([p], D_BLOCKS, TOTAL)], idle=True)
        asked(p)
        p.step(advance(P_BLOCKS, 0, TOTAL, TOTAL), compute=lambda layer: fill([p.caches[layer]], P_BLOCKS, layer))
        waiting.result(LIMIT)
    assert d.ended == {"d-t"}, "it has returned before"
    assert not d.failed
    p.step(**held())
    settle(p, d)
    same(p, d, P_BLOCKS, D_BLOCKS)


def test_a_prefiller_waits_in_one_step_until_its_blocks_are_free(open_rank: Ranks, long: None) -> None:
    p, d = pair(open_rank)
    p.step(advance(P_BLOCKS, 0, TOTAL, TOTAL), compute=lambda layer: fill([p.caches[layer]], P_BLOCKS, layer))
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(p.step, **held(), idle=True)
        d.step(loads=[load([p], D_BLOCKS, TOTAL)])
        waiting.result(LIMIT)
    assert p.sent == {"p-t"}, "it has returned before"
    settle(p, d)
    same(p, d, P_BLOCKS, D_BLOCKS)


@pytest.mark.parametrize(
    "what", ["nothing is under way", "something is computed", "on a GPU", "something is to be told"]
)
def test_nobody_sleeps_in_a_step_when(open_rank: Ranks, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    p, d = pair(open_rank)

    def sleep(_seconds: float) -> NoReturn:
        raise AssertionError("it sleeps")

    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    if what == "nothing is under way":
        d.step(idle=True)
        p.step(idle=True)
        return
    asks = {"loads": [load([p], D_BLOCKS, TOTAL)]}
    if what == "on a GPU":
        monkeypatch.setattr(d.worker, "_events", object())
    if what == "something is to be told":
        assert d.worker.receives is not None
        d.worker.receives.report.safe["another"] = 1
    d.step(**asks, idle=what != "something is computed")
    monkeypatch.undo()
    p.step(advance(P_BLOCKS, 0, TOTAL, TOTAL))
    p.step(**held())
    settle(p, d)


def test_the_scheduler_half_says_whether_something_is_computed() -> None:
    d = half(consumer=True)
    assert d.step(scheduled({})).idle
    assert not d.step(scheduled({"r": 1})).idle
