"""What a job does not let happen: pages that change under it, or that it changes after its end, and words that lie."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kv_pair import KV, LAYOUT, LIMIT, TOKENS, open_pair, serve, until

from fabric_core import BadRange, Cancelled, FabricError, StaleHandle
from fabric_kvcache import PrefillRefused
from fabric_kvcache import job as job_module
from fabric_kvcache.layout import pack

# ---- pushes that are refused change nothing


def test_a_push_that_is_refused_copies_nothing() -> None:
    """What is under way, or was sent, is what was pushed first."""
    with open_pair() as pair:
        job, pending = pair.start()
        pool = pair.prefiller.pool
        job.push_layer(0, 0, KV, KV)
        before = pool.octets.copy()
        for first, last in ((0, TOKENS), (4, 6)):
            with pytest.raises(BadRange, match="pushed before"):
                job.push_layer(0, first, 2 * KV[:, first:last], 2 * KV[:, first:last])
        wide, narrow = KV.astype(np.float64), KV.astype(np.float16)
        for keys, values in ((wide, wide), (narrow, narrow), (KV, narrow), (KV, KV[:, :5]), (KV[0], KV[0])):
            with pytest.raises(BadRange):
                job.push_layer(1, 0, keys, values)
        assert np.array_equal(pool.octets, before)
        job.push_layer(1, 0, KV, KV)
        job.finish()
        with pending.wait() as kv:
            assert (kv.layer(0)[0].view(np.float32) == 1).all()


def test_a_job_that_was_left_touches_no_page() -> None:
    """They belong to another job, or will."""
    with open_pair() as pair:
        job, pending = pair.start()
        hook = job.hook(0, TOKENS)
        pending.cancel()
        assert pending.wait_settled(LIMIT)
        with pytest.raises(Cancelled):
            job.finish()
        before = pair.prefiller.pool.octets.copy()
        calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (job.push_layer, (0, 0, KV, KV)),
            (job.push, (0, 0, TOKENS)),
            (hook, (0,)),
            (job.push_tail, (b"",)),
        ]
        for call, args in calls:
            with pytest.raises(StaleHandle, match="was left"):
                call(*args)
        assert np.array_equal(pair.prefiller.pool.octets, before)
        done, other = pair.start()
        serve(done)
        other.wait().release()
        with pytest.raises(StaleHandle, match="was left"):
            done.push_layer(0, 0, KV, KV)


def test_a_job_is_not_left_in_the_middle_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that leaves it waits for the one that copies."""
    copying, go = threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        copying.set()
        assert go.wait(LIMIT)
        assert pair.prefiller.pool.free < 8
        pack(*args)
        ends.append("copied")

    ends: list[str] = []
    monkeypatch.setattr(job_module, "pack", slow)
    with open_pair() as pair:
        job, pending = pair.start()

        def push() -> None:
            with pytest.raises(PrefillRefused, match="enough"):  # nobody wants it any more
                job.push_layer(0, 0, KV, KV)

        def leave() -> None:
            job.abandon("enough")
            ends.append("left")

        pusher, leaver = threading.Thread(target=push), threading.Thread(target=leave)
        pusher.start()
        assert copying.wait(LIMIT)
        leaver.start()
        until(lambda: job.cancelled)
        go.set()
        pusher.join(LIMIT)
        leaver.join(LIMIT)
        assert ends == ["copied", "left"]
        assert pair.prefiller.pool.free == 8
        with pytest.raises(PrefillRefused):
            pending.wait()


def test_the_pages_of_a_job_are_named_once() -> None:
    """Chunks that were begun would go on with the first ones."""
    memory = np.ones(LAYOUT.pool_bytes(8), np.uint8)
    with open_pair(memory) as pair:
        job, pending = pair.start()
        with job:
            with pytest.raises(BadRange, match="3 are needed"):
                job.use([[0]])
            job.use([[5, 2, 7]])
            job.use([[5, 2, 7]])
            with pytest.raises(BadRange, match="a second time"):
                job.use([[5, 2, 6]])
            assert job.tables[0].tolist() == [5, 2, 7]
            job.push_all(0, TOKENS)
        pending.wait().release()


def test_a_job_that_is_dropped_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with open_pair() as pair:
        job, pending = pair.start()
        pending.cancel()
        assert pending.wait_settled(LIMIT)
        name = job.request.request_id
        del job
        gc.collect()
        assert f"request {name} was dropped" in caplog.text
        caplog.clear()
        job, pending = pair.start()
        serve(job)
        pending.wait().release()
        del job
        gc.collect()
        assert "was dropped" not in caplog.text


# ---- words


def test_a_word_that_is_still_bumped_is_nobody_elses() -> None:
    """A GPU has work queued when its job is cancelled. Its last steps push no layer of the next job."""
    with open_pair() as pair:
        job, pending = pair.start()
        watch = job.watch([(0, TOKENS)])
        word = ctypes.c_uint64.from_address(watch.ptr)
        pending.cancel()
        assert pending.wait_settled(LIMIT)
        with pytest.raises(Cancelled):
            job.finish()
        job, pending = pair.start()
        with job:
            other = job.watch([(0, TOKENS)])
            assert other.ptr != watch.ptr
            word.value = 1  # the first job's work goes on
            until(lambda: watch.value == 1)
            assert other.value == 0
            assert job.pushes == []
            word.value = 2
            until(lambda: watch._word.closed)  # it was its last step
            pair.prefiller.pool.view[:] = 7
            other.value = 2
        with pending.wait() as kv:
            assert (kv.layer(1)[1] == 7).all()


def test_a_word_comes_back_where_nobody_else_can_have_it() -> None:
    with open_pair() as pair:
        for lent, released in ((False, False), (True, True), (True, False)):
            job, pending = pair.start()
            watch = job.watch([(0, TOKENS)])
            if lent:
                assert watch.ptr
            job.abandon("enough")
            assert watch._word.closed == (not lent)
            if released:
                watch.release()
                watch.release()
                assert watch._word.closed
            with pytest.raises(PrefillRefused):
                pending.wait()
        watch.value = 2  # by this process: the last step of a job that is over
        assert watch._word.closed
        job, pending = pair.start()
        with job:
            watch = job.watch([(0, TOKENS)])
            assert watch.ptr
            watch.value = 2
        assert watch._word.closed
        pending.wait().release()


def test_a_watch_whose_push_is_refused_says_why() -> None:
    with open_pair() as pair:
        job, pending = pair.start()
        watch = job.watch([(0, 6), (4, TOKENS)])
        watch.value = 4
        with pytest.raises(FabricError, match=r"token 6 of layer 0 .* was refused: tokens 4\.\.10: pushed before"):
            job.finish()
        with pytest.raises(PrefillRefused, match="pushed before"):
            pending.wait()


def test_a_hook_for_a_layer_that_there_is_not_is_refused() -> None:
    with open_pair() as pair:
        job, pending = pair.start()
        hook = job.hook(0, TOKENS)
        for layer in (2, -1, "x"):
            with pytest.raises(BadRange, match=f"layer {layer!r}: the model has layers 0-1"):
                hook(layer)  # type: ignore[arg-type]
        for layer in job.layers:
            hook(layer)
        job.finish()
        pending.wait().release()
