"""The prefiller's side of the bargain, both sides in this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from fabric_core import BadRange, DeadlineExceeded, FabricError, TransferEngine, WaitTimeout
from fabric_kvcache import Decoder, KvLayout, PendingKv, Prefiller, PrefillJob, PrefillRefused
from fabric_kvcache.protocol import KvReject, encode

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=4, page_tokens=4)
KV = np.ones((2, 10, 4), dtype=np.float32)


@dataclass
class Pair:
    prefiller: Prefiller
    decoder: Decoder

    def ask(self, tokens: int = 10, timeout: float = 20.0) -> PendingKv:
        return self.decoder.submit(self.prefiller.engine.address, range(tokens), timeout=timeout)

    def start(self, tokens: int = 10, timeout: float = 20.0) -> tuple[PrefillJob, PendingKv]:
        pending = self.ask(tokens, timeout)
        return self.prefiller.next(10), pending


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
    """C6, and one immediate a page: nothing is pushed twice."""
    job, pending = pair.start()
    for layer, first, tokens in [(2, 0, 10), (-1, 0, 10), (0, 2, 8), (0, 0, 7), (0, 0, 0), (0, 8, 3), (0, -4, 4)]:
        with pytest.raises(BadRange):
            job.push_layer(layer, first, KV[:, :tokens], KV[:, :tokens])
    with pytest.raises(BadRange, match="do not fit"):
        job.push_layer(0, 0, KV[:1], KV[:1])
    with pytest.raises(BadRange, match="tail of 5 bytes"):
        job.push_tail(b"12345")
    assert job.pushes == []
    with job:
        job.push_layer(0, 4, KV[:, 4:], KV[:, 4:])
        with pytest.raises(BadRange, match="pushed before"):
            job.push_layer(0, 4, KV[:, 4:8], KV[:, 4:8])
        job.push_layer(0, 0, KV[:, :4], KV[:, :4])
        job.push_layer(1, 0, KV, KV)
        job.push_tail(b"tail")
        with pytest.raises(BadRange, match="once"):
            job.push_tail(b"tail")
    with pending.wait() as kv:
        assert (kv.layer(1)[0].view(np.float32) == 1).all()
        assert kv.tail == b"tail"
    assert pair.prefiller.pool.free == 8
    assert sum(push.writes for push in job.pushes) == 7
    assert all(push.began <= push.submitting <= push.submitted and push.done for push in job.pushes)


@pytest.mark.parametrize("left_out", ["page 0 of layer 1", "the tail"])
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
    job, pending = pair.start(timeout=1.0)
    with pytest.raises(DeadlineExceeded):
        pending.wait()
    while time.monotonic() < job._deadline:  # the decoder's clock began a little earlier
        time.sleep(0.001)
    with pytest.raises(DeadlineExceeded, match="deadline of request"):
        leave_after(job, 0, tail=False)
    assert job.pushes == []
    assert pair.prefiller.pool.free == 8


def test_a_request_whose_time_passed_in_the_queue_is_not_started(pair: Pair) -> None:
    pending = pair.ask(timeout=0.5)
    with pytest.raises(DeadlineExceeded):
        pending.wait()
    end = time.monotonic() + 10
    while not (queued := list(pair.prefiller._waiting.queue)) or queued[0].deadline > time.monotonic():
        assert time.monotonic() < end  # the prefiller's clock began at the arrival
        time.sleep(0.001)
    with pytest.raises(WaitTimeout, match="no request"):
        pair.prefiller.next(0.3)


def test_requests_beyond_the_queue_or_the_pool_are_refused(pair: Pair) -> None:
    first = pair.ask(tokens=20)
    job = pair.prefiller.next(10)
    second = pair.ask(tokens=20)  # needs 5 of the 3 pages that are left
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
        for data in (b"", b"GET / HTTP/1.0", b"fkv\x01\x93", encode(KvReject("x", "a refusal, to a prefiller"))):
            engine.submit_send(target, data).wait(10)
        pair.prefiller.engine.submit_send(engine.address, b"fkv\x02").wait(10)
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
    pending.cancel()
    pair.decoder.engine.close()
    with pytest.raises(FabricError, match=address):
        leave_after(job, 1, tail=True)
    assert pair.prefiller.pool.free == 8
