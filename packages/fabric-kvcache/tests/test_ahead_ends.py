"""Pushes prepared ahead, and how they end badly: cancels, lost peers, deadlines, a full engine, at any moment."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ahead_pair import SINGLE, STEPS, fill, prepared, word_of
from kv_pair import LAYOUT, LIMIT, TOKENS, instance, open_pair, until

from fabric_core import Cancelled, DeadlineExceeded, FabricError, PeerLost, PreparedSequence, TransferEngine
from fabric_kvcache import Decoder, KvLayout, Prefiller, PrefillRefused

if TYPE_CHECKING:
    from peer_process import Peers


def bump(word: ctypes.c_uint64, seed: int, stop: threading.Event) -> None:
    rng = random.Random(seed)
    for step in range(1, STEPS + 1):
        word.value = step
        if stop.wait(rng.random() / 500):
            break
    word.value = STEPS  # a GPU's queue goes on, whatever happens


def test_a_cancel_in_the_middle_is_confirmed_and_nothing_lands_after_it() -> None:
    """At random moments. Once it is settled, the pages are another's: no byte comes any more."""
    with open_pair() as pair:
        for seed in range(25):
            job, pending = pair.start()
            fill(pair, 7)
            watch = prepared(job, SINGLE)
            thread = threading.Thread(target=bump, args=(word_of(watch), seed, threading.Event()))
            thread.start()
            time.sleep(random.Random(seed).random() / 50)
            pending.cancel()
            assert pending.wait_settled(LIMIT)
            pair.decoder.pool.view[:] = 0
            thread.join(LIMIT)
            until(lambda w=watch: w._adopted == STEPS)
            assert not pair.decoder.pool.view.any()
            try:
                job.finish()
            except Cancelled:
                assert job.cancelled
            assert job.idle
            assert pair.prefiller.pool.free == 8
            assert watch._word.closed
        assert pair.decoder.pool.free == 16
        assert pair.a.stats()["inflight"] == 0


def test_a_rank_has_not_ended_before_what_was_submitted_is_known_here() -> None:
    """Stopped between the engine's submit and the moment that Python hears of it: its writes are under way still."""
    with open_pair() as pair:
        job, pending = pair.start()
        watch = prepared(job, SINGLE)
        (target,) = job._targets
        with job._lock:  # so the callback thread does not come to it
            word_of(watch).value = 4
            until(lambda: watch._sequence.submitted == 4)
            pair.prefiller._stop(target, "failed", "on purpose")
            assert job.idle is False
            assert not target._over
        until(lambda: target._over)
        assert job.idle
        with pytest.raises(PrefillRefused, match="on purpose"):
            pending.wait()
        job.abandon("over")


def test_what_was_not_submitted_was_not_pushed() -> None:
    with open_pair() as pair:
        job, pending = pair.start()
        watch = prepared(job, SINGLE)
        watch._sequence.cancel()  # by nobody that the watch or the rank knows of
        watch.value = STEPS
        assert watch._adopted == STEPS
        assert not watch.wait_all(0)
        assert not job.whole
        job.abandon("over")
        with pytest.raises(PrefillRefused, match="over"):
            pending.wait()


@pytest.mark.parametrize("how", ["cancels", "is late"])
def test_one_decoder_rank_ends_and_the_other_gets_all(how: str) -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(TransferEngine.open()) for _ in range(3)]
        source = stack.enter_context(Prefiller(engines[0], instance(1), pages=8))
        ranks = [
            stack.enter_context(Decoder(engine, instance(2), tp=tp, pages=8, instance="two"))
            for tp, engine in enumerate(engines[1:])
        ]
        first, second = (
            rank.submit(engines[0].address, range(TOKENS), request_id="r", timeout=LIMIT) for rank in ranks
        )
        job = source.next(LIMIT)
        source.pool.view[:] = 3
        (early,) = (target for target in job._targets if target.session.address == engines[1].address)
        if how == "is late":  # by the prefiller's clock
            early.deadline = time.monotonic() - 1
        watch = prepared(job, SINGLE)
        watch.value = 6
        if how == "cancels":
            first.cancel()
        assert first.wait_settled(LIMIT)
        ranks[0].pool.view[:] = 0
        word_of(watch).value = STEPS
        assert watch.wait_all(LIMIT)
        with pytest.raises((Cancelled, DeadlineExceeded)):  # one of its ranks did not get it all
            job.finish()
        assert not ranks[0].pool.view.any()
        with second.wait() as kv:
            assert all((kv.layer(layer)[k] == 3).all() for layer in range(2) for k in range(2))


def test_a_peer_that_is_killed_in_the_middle(peers: Peers) -> None:
    layout = KvLayout(layers=2, kv_heads=1, head_dim=4, page_tokens=4)
    with TransferEngine.open() as a, Prefiller(a, layout, pages=8, tail_bytes=4) as source:
        peer = peers.run(Path(__file__).parent / "decoder_peer.py", f"killed-{os.getpid()}", str(a.address))
        job = source.next(LIMIT)
        watch = prepared(job, [(token, token + 1) for token in range(8)])
        watch.value = 5
        peer.kill()
        word_of(watch).value = 9
        with pytest.raises(PeerLost):
            job.finish()
        watch.value = 16
        assert job.idle
        assert source.pool.free == 8
        assert watch._word.closed


def test_a_full_engine_is_waited_for() -> None:
    """What it refuses in C is pushed by Python, which has the engine's patience."""
    with (
        TransferEngine.open(max_inflight=2, faults="delay=20ms,seed=3") as a,
        TransferEngine.open() as b,
        Prefiller(a, LAYOUT, pages=8) as source,
        Decoder(b, LAYOUT, pages=16) as decoder,
    ):
        pending = decoder.submit(a.address, range(TOKENS), timeout=LIMIT)
        job = source.next(LIMIT)
        source.pool.view[:] = 4
        with job:
            watch = prepared(job, SINGLE)
            watch.value = STEPS
            assert watch._sequence.refused() is not None
            assert watch.wait_all(LIMIT)
        with pending.wait() as kv:
            assert all((kv.layer(layer)[k] == 4).all() for layer in range(2) for k in range(2))


def test_a_step_after_the_deadline_is_refused() -> None:
    with open_pair() as pair:
        job, pending = pair.start()
        (target,) = job._targets
        target.deadline = time.monotonic() + 0.2  # by the prefiller's clock
        watch = prepared(job, SINGLE)
        watch.value = 2
        until(lambda: time.monotonic() > target.deadline)
        word_of(watch).value = 4
        until(lambda: watch.error is not None)
        assert isinstance(watch.error, DeadlineExceeded)
        with pytest.raises(FabricError):
            job.finish()
        with pytest.raises(PrefillRefused, match="deadline has passed"):
            pending.wait()


def test_a_watch_of_a_job_that_nobody_wants_any_more() -> None:
    with open_pair() as pair:
        job, pending = pair.start()
        pending.cancel()
        assert pending.wait_settled(LIMIT)
        watch = prepared(job, SINGLE)
        watch.value = 3
        assert isinstance(watch.error, Cancelled)
        with pytest.raises(Cancelled):
            job.finish()
        assert watch._word.closed
        assert isinstance(watch._word, PreparedSequence)
