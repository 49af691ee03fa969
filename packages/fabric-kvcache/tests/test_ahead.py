"""A word whose pushes were prepared ahead: submitted in C when it is bumped, adopted here, and ended as any push."""

from __future__ import annotations

import time

import numpy as np
import pytest
from ahead_pair import SINGLE, STEPS, fill, prepared, word_of
from kv_pair import LAYOUT, LIMIT, TOKENS, open_pair, until

from fabric_core import BadRange, StaleHandle
from fabric_kvcache.watcher import CalledWatch


def test_a_word_that_jumps_pushes_every_layer_once() -> None:
    """By a thread of this process and behind its back; several steps at once; the pushes are noted in order."""
    with open_pair() as pair:
        for jumps in ([20], list(range(1, 21)), [3, 4, 11, 20]):
            job, pending = pair.start()
            fill(pair, 9)
            with job:
                watch = prepared(job, SINGLE)
                began = time.monotonic_ns()
                for n, jump in enumerate(jumps):
                    if n % 2:
                        watch.value = jump
                        assert len(job.pushes) == jump  # done in this thread, when it returns
                    else:
                        word_of(watch).value = jump
                        until(lambda job=job, jump=jump: len(job.pushes) == jump)
                assert watch.wait_all(LIMIT)
            with pending.wait() as kv:
                assert all((kv.layer(layer)[k] == 9).all() for layer in range(2) for k in range(2))
                assert kv.writes == sum(push.writes for push in job.pushes)
            assert [push.layer for push in job.pushes] == [0, 1] * TOKENS
            assert all(0 < p.began <= p.submitted <= p.done for p in job.pushes)
            assert len(watch.posted_ns) == STEPS
            assert all(began <= at <= time.monotonic_ns() for at in watch.posted_ns)
            assert watch.error is None
            assert watch._word.closed


def test_what_cannot_be_prepared_is_pushed_by_a_callback() -> None:
    """Pages that are named later, and parts that overlap: the push says what is wrong, as ever."""
    memory = np.ones(2 * 8 * LAYOUT.page_bytes // 4, np.float32)
    with open_pair(memory) as pair:
        job, pending = pair.start()
        with job:
            early = job.watch([(0, 4)])
            assert isinstance(early, CalledWatch)
            job.use([[5, 2, 7]])
            assert isinstance(job.watch([(4, 8), (7, 10)]), CalledWatch)
            late = prepared(job, [(4, 10)])
            early.value = late.value = 2
        with pending.wait() as kv:
            assert all((words.view(np.float32) == 1).all() for words in kv.layer(1))


def test_parts_of_a_word_are_pushed_by_nobody_else() -> None:
    with open_pair() as pair:
        job, pending = pair.start()
        fill(pair, 5)
        with job:
            watch = prepared(job, [(0, 4), (4, 8)])
            with pytest.raises(BadRange, match=r"tokens 3\.\.5 of layer 1: a word that is watched pushes them"):
                job.push(1, 3, 5)
            assert isinstance(job.watch([(0, 4)]), CalledWatch)  # refused when it is bumped
            watch.value = 2
            with pytest.raises(BadRange, match="pushed before"):
                job.push(0, 0, 4)
            watch.close()  # its second chunk is free again
            word_of(watch).value = 4
            for layer in range(2):
                job.push(layer, 4, 10)
        with pending.wait() as kv:
            assert all((kv.layer(layer)[0] == 5).all() for layer in range(2))
        with pytest.raises(StaleHandle, match="left"):
            job.push(0, 0, 1)
