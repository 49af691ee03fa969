"""The prefiller's side of the bargain, both sides in this process."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest
from kv_pair import open_pair

from fabric_core import BadRange, Cancelled, ConfigError, DeadlineExceeded, FabricError, TransferEngine, WaitTimeout
from fabric_kvcache import Decoder, KvDamaged, KvLayout, PendingKv, Prefiller, PrefillJob, PrefillRefused
from fabric_kvcache.protocol import Ended, encode

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=4, page_tokens=4)
KV = np.ones((2, 10, 4), dtype=np.float32)


@dataclass
class Pair:
    prefiller: Prefiller
    decoder: Decoder

    def ask(self, tokens: int = 10, timeout: float = 60.0) -> PendingKv:
        return self.decoder.submit(self.prefiller.engine.address, range(tokens), timeout=timeout)

    def start(self, tokens: int = 10, timeout: float = 60.0) -> tuple[PrefillJob, PendingKv]:
        pending = self.ask(tokens, timeout)
        return self.prefiller.next(30), pending


def leave_after(job: PrefillJob, *layers: int, tail: bool) -> None:
    """Push these layers, and perhaps the tail, then end the job."""
    with job:
        for layer in layers:
            job.push_layer(layer, 0, KV, KV)
        if tail:
            job.push_tail(b"tail")


@pytest.fixture
def pair() -> Iterator[Pair]:
    with (
        TransferEngine.open() as a,
        TransferEngine.open() as b,
        Prefiller(a, LAYOUT, pages=8, tail_bytes=4, max_waiting=2) as prefiller,
        Decoder(b, LAYOUT, pages=16, tail_bytes=4) as decoder,
    ):
        yield Pair(prefiller, decoder)


def test_a_push_that_does_not_fit_is_refused_before_anything_moves(pair: Pair) -> None:
    """C6, and nothing is pushed twice."""
    job, pending = pair.start()
    for layer, first, tokens in [(2, 0, 10), (-1, 0, 10), (0, 0, 0), (0, 8, 3), (0, -4, 4), (0, 10, 1)]:
        with pytest.raises(BadRange):
            job.push_layer(layer, first, KV[:, :tokens], KV[:, :tokens])
    with pytest.raises(BadRange, match="do not fit"):
        job.push_layer(0, 0, KV[:1], KV[:1])
    with pytest.raises(BadRange, match="tail of 5 bytes"):
        job.push_tail(b"12345")
    assert job.pushes == []
    with job:
        job.push_layer(0, 3, KV[:, 3:], KV[:, 3:])
        with pytest.raises(BadRange, match="pushed before"):
            job.push_layer(0, 4, KV[:, 4:8], KV[:, 4:8])
        job.push_layer(0, 0, KV[:, :3], KV[:, :3])
        job.push_layer(1, 0, KV, KV)
        job.push_tail(b"tail")
        with pytest.raises(BadRange, match="once"):
            job.push_tail(b"tail")
    with pending.wait() as kv:
        assert (kv.layer(1)[0].view(np.float32) == 1).all()
        assert kv.tail == b"tail"
    assert pair.prefiller.pool.free == 8
    assert sum(push.writes for push in job.pushes) == kv.writes
    assert all(push.began <= push.submitting <= push.submitted and push.done for push in job.pushes)


@pytest.mark.parametrize("left_out", ["token 0 of layer 1", "the tail"])
def test_a_job_that_is_left_unfinished_is_refused_with_what_is_missing(pair: Pair, left_out: str) -> None:
    job, pending = pair.start()
    with pytest.raises(FabricError, match=f"{left_out} of request"):
        leave_after(job, *([0, 1] if left_out == "the tail" else [0]), tail=False)
    with pytest.raises(PrefillRefused, match=left_out):
        pending.wait()
    assert pair.prefiller.pool.free == 8
    assert pair.decoder.pool.free == 16


def test_a_job_past_its_deadline_pushes_nothing_more(pair: Pair) -> None:
    """R3: both sides have the deadline."""
    job, pending = pair.start(timeout=2.0)
    with pytest.raises(DeadlineExceeded):
        pending.wait()
    end = time.monotonic() + 10
    while not job.cancelled and time.monotonic() < end:  # its own clock, or the decoder's word, whichever is first
        with suppress(DeadlineExceeded, Cancelled):
            job._alive()
    with pytest.raises((DeadlineExceeded, Cancelled), match="request"):
        leave_after(job, 0, tail=False)
    assert job.pushes == []
    assert pair.prefiller.pool.free == 8


def test_a_request_whose_time_passed_in_the_queue_is_not_started(pair: Pair) -> None:
    pending = pair.ask(timeout=0.5)
    with pytest.raises(DeadlineExceeded):
        pending.wait()
    assert pending.wait_settled(20), "the prefiller has confirmed that it does not serve it"
    assert pair.decoder.pool.free == 16
    with pytest.raises(WaitTimeout, match="no request"):
        pair.prefiller.next(0.3)


def test_requests_beyond_the_queue_or_the_pool_are_refused(pair: Pair) -> None:
    first = pair.ask(tokens=20)
    job = pair.prefiller.next(30)
    second = pair.ask(tokens=20)  # needs 5 of the 3 pages that are left
    end = time.monotonic() + 20
    while not pair.prefiller._whole:
        assert time.monotonic() < end
    with pytest.raises(WaitTimeout):
        pair.prefiller.next(0.3)
    with pytest.raises(PrefillRefused, match="no room: 5 pages wanted"):
        second.wait()
    waiting = [pair.ask(tokens=4) for _ in range(3)]
    end = time.monotonic() + 10
    while not any(one.done for one in waiting):
        assert time.monotonic() < end
    refused = [one for one in waiting if one.done]  # messages have no order: any of them may be the third
    assert len(refused) == 1
    with pytest.raises(PrefillRefused, match="2 requests are waiting"):
        refused[0].wait()
    job.abandon("enough")
    with pytest.raises(PrefillRefused, match="enough"):
        first.wait()


def test_messages_that_are_none_are_counted_and_harm_nothing(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """C12."""
    engine, target = pair.decoder.engine, pair.prefiller.engine.address
    with caplog.at_level(logging.WARNING, logger="fabric.kvcache"):
        for data in (b"", b"GET / HTTP/1.0", b"fkv\x01\x93", b"fkv\x02\x91\xc0"):
            engine.submit_send(target, data).wait(10)
        pair.prefiller.engine.submit_send(engine.address, b"fkv\x02").wait(10)
        engine.submit_send(target, encode(Ended(1, 2, "failed", "an answer, to a prefiller"))).wait(10)
        job, pending = pair.start()
    assert pair.prefiller.malformed == 4
    assert sum("ignored" in record.message for record in caplog.records) >= 4
    job.abandon("done")
    with pytest.raises(PrefillRefused):
        pending.wait()


def test_a_decoder_that_goes_away_fails_the_job_with_its_name(pair: Pair) -> None:
    """C11."""
    job, pending = pair.start()
    job.push_layer(0, 0, KV, KV)
    address = str(pair.decoder.engine.address)
    pair.decoder.engine.close()
    with pytest.raises(FabricError):
        pending.wait()
    with pytest.raises(FabricError, match=address):
        leave_after(job, 1, tail=True)
    assert pair.prefiller.pool.free == 8


def test_two_prefillers_on_one_engine_are_refused_and_roles_can_change(pair: Pair) -> None:
    """A Hello names no rank, so one engine is one rank; a decoder may share it, and take its place."""
    engine = pair.prefiller.engine
    with pytest.raises(ConfigError, match="one rank, one engine"):
        Prefiller(engine, LAYOUT, pages=8)
    with Decoder(engine, LAYOUT, pages=8, tail_bytes=4) as second:
        pending = second.submit(engine.address, range(10), timeout=60)  # of itself
        leave_after(pair.prefiller.next(30), 0, 1, tail=True)
        with pending.wait() as kv:
            assert kv.tail == b"tail"
        pair.prefiller.close()
        with Prefiller(pair.decoder.engine, LAYOUT, pages=8, tail_bytes=4) as other:
            pending = second.submit(pair.decoder.engine.address, range(10), timeout=60)
            leave_after(other.next(10), 0, 1, tail=True)
            pending.wait().release()


def test_layers_are_pushed_by_a_word_by_a_hook_and_from_a_cache(pair: Pair) -> None:
    """Three ways to say that a layer is ready. The word may jump: nothing is missed, nothing is pushed twice."""
    job, pending = pair.start()
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**32 - 1, (2, 2, 2, 10, 4), np.uint32)  # layer, K or V, head, token, dim
    pool = pair.prefiller.pool
    for layer in range(2):
        for which in (0, 1):
            for token in range(10):
                pool.view[layer, job.tables[0][token // 4], :, which, token % 4] = words[layer, which, :, token]
    with job:
        job.push_all(0, 2)  # a prefix that was in the cache
        hook = job.hook(2, 5)
        for layer in range(2):
            hook(layer)
        watch = job.watch([(5, 7), (7, 10)])
        watch.value = 1
        watch.value = 4
        job.push_tail(b"tail")
    with pending.wait() as kv:
        for layer in range(2):
            assert np.array_equal(np.stack(kv.layer(layer)), words[layer])
    assert watch.wait_all(0)


def test_a_word_is_bumped_by_this_process_and_behind_its_back(pair: Pair) -> None:
    """A value that is set is pushed when the setter returns; an addition in memory, as a GPU makes it, soon after."""
    job, pending = pair.start()
    with job:
        watch = job.watch([(0, 5), (5, 10)])
        watch.value = 1
        assert [push.layer for push in job.pushes] == [0]
        word = ctypes.c_uint64.from_address(watch.ptr)
        word.value = 2
        end = time.monotonic() + 60
        while len(job.pushes) < 2:
            assert time.monotonic() < end
        threads = [threading.Thread(target=setattr, args=(watch, "value", steps)) for steps in (3, 4, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert watch.wait_all(60)
        assert len(job.pushes) == 4
        job.push_tail(b"tail")
    pending.wait().release()
    assert watch.error is None


def test_a_hook_sends_each_layer_once_in_any_order(pair: Pair) -> None:
    """What it writes was worked out before; that a layer was pushed is looked at when it is called."""
    job, pending = pair.start()
    pair.prefiller.pool.view[:] = np.float32(1).view(np.uint32)
    with job:
        for first, end in [(0, 0), (-1, 4), (4, 11)]:
            with pytest.raises(BadRange, match="of 10"):
                job.hook(first, end)
        early, late = job.hook(0, 6), job.hook(6, 10)
        late(1)
        early(0)
        with pytest.raises(BadRange, match="layer 7: the model has layers 0-1"):
            early(7)
        with pytest.raises(BadRange, match="pushed before"):
            early(0)
        with pytest.raises(BadRange, match="pushed before"):
            job.push(1, 6, 10)
        early(1)
        late(0)
        job.push_tail(b"tail")
    with pending.wait() as kv:
        assert all((kv.layer(layer)[k].view(np.float32) == 1).all() for layer in range(2) for k in range(2))
        assert kv.writes == sum(push.writes for push in job.pushes)
    job, pending = pair.start()
    hook = job.hook(0, 10)
    pending.cancel()
    with pytest.raises(Cancelled):
        pending.wait()
    assert pending.wait_settled(60)
    with pytest.raises(Cancelled), job:
        hook(0)
    assert job.pushes == []


def test_a_hook_may_be_made_before_the_pages_are_named() -> None:
    memory = np.ones(2 * 8 * LAYOUT.page_bytes // 4, np.float32)  # the user's own: 2 layers, 8 pages
    with open_pair(memory) as pair:
        job, pending = pair.start()
        with job:
            hook = job.hook(0, 10)
            with pytest.raises(BadRange, match="use"):
                hook(0)
            job.use([[5, 2, 7]])
            for layer in job.layers:
                hook(layer)
        with pending.wait() as kv:
            assert all((words.view(np.float32) == 1).all() for words in kv.layer(1))


def test_a_word_that_stops_short_leaves_the_job_unfinished(pair: Pair) -> None:
    """R3: leaving it ends at the deadline, and says what was not pushed."""
    job, pending = pair.start(timeout=2.0)
    watch = job.watch([(0, 10)])
    watch.value = 1
    with pytest.raises(FabricError), job:
        job.push_tail(b"tail")
    with pytest.raises(FabricError):
        pending.wait()
    assert not watch.wait_all(0)
    assert pending.wait_settled(20)


def test_a_request_is_taken_by_its_name(pair: Pair) -> None:
    """For an engine that schedules by itself, and knows the prompt already."""
    first, second = (pair.decoder.submit(pair.prefiller.engine.address, 10, request_id=name) for name in ("a", "b"))
    job = pair.prefiller.take("b", 10)
    assert (job.request.request_id, job.total, len(job.tokens)) == ("b", 10, 0)
    with pytest.raises(WaitTimeout, match="request b did not come"):
        pair.prefiller.take("b", 0.05)
    leave_after(job, 0, 1, tail=True)
    second.wait().release()
    leave_after(pair.prefiller.next(30), 0, 1, tail=True)
    first.wait().release()


def test_an_immediate_too_many_is_damage(pair: Pair) -> None:
    """C3: a surplus is reported. Whatever was counted for it may not be there."""
    job, pending = pair.start()
    (target,) = job._targets
    job.push_layer(0, 0, KV, KV)
    pair.prefiller.engine.submit_barrier(None, None, target.head.imm, [target.session.slots]).wait(30)
    leave_after(job, 1, tail=True)
    with pytest.raises(KvDamaged):
        pending.wait()
    assert pending.wait_settled(20)
    assert pair.decoder.pool.free == 16
