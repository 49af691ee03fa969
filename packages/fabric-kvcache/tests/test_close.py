"""Closing, while the engine and the other side live on: who waits is told, and nothing stays."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from contextlib import suppress
from typing import Any

import pytest
from kv_pair import KV, LAYOUT, LIMIT, TOKENS, instance, open_pair, serve, until

from fabric_core import Cancelled, StaleHandle, TransferEngine
from fabric_kvcache import Decoder, PendingKv, PoolExhausted, Prefiller, PrefillRefused, decoder, ranks
from fabric_kvcache.protocol import Ask, Cancel, Goodbye

# ---- of a decoder


def test_a_closed_decoder_takes_no_request() -> None:
    with open_pair() as pair:
        pair.decoder.close()
        for _ in range(2):
            with pytest.raises(StaleHandle, match="decoder is closed"):
                pair.ask()
        assert (pair.decoder.pool.free, pair.decoder.in_flight) == (16, 0)
        assert pair.decoder.ranks._writers == set()
        pair.decoder.close()


@pytest.mark.parametrize("where", ["lease", "register", "PendingKv", "when_ready"])
def test_a_request_that_races_with_close_ends(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed in the middle of a submit, at either side of the place where it is noted: refused, or cancelled."""
    with open_pair() as pair:
        owner: Any = {"PendingKv": decoder, "when_ready": pair.decoder.ranks}.get(where, pair.decoder.pool)
        real = getattr(owner, where)

        def close_first(*args: Any) -> Any:
            monkeypatch.undo()
            pair.decoder.close()
            return real(*args)

        monkeypatch.setattr(owner, where, close_first)
        if where == "when_ready":
            pending = pair.ask()
            with pytest.raises(Cancelled):
                pending.wait()
            assert pending.wait_settled(LIMIT)
        else:
            with pytest.raises(StaleHandle, match="decoder is closed"):
                pair.ask()
        assert (pair.decoder.pool.free, pair.decoder.in_flight) == (16, 0)
        assert pair.decoder.ranks._writers == set()


def test_requests_of_many_threads_end_when_the_decoder_closes() -> None:
    with open_pair(max_requests=64) as pair:
        made: list[PendingKv] = []

        def ask() -> None:
            with suppress(StaleHandle, PoolExhausted):
                while True:
                    made.append(pair.decoder.submit(pair.a.address, 1, timeout=LIMIT))
                    made[-1].cancel()

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: len(made) > 3)
        pair.decoder.close()
        for thread in threads:
            thread.join(LIMIT)
        for pending in made:
            with pytest.raises(Cancelled):
                pending.wait(LIMIT)
            assert pending.wait_settled(LIMIT)
        assert (pair.decoder.in_flight, pair.decoder.pool.free) == (0, 16)


def test_what_a_prefiller_has_not_confirmed_settles_after_close(caplog: pytest.LogCaptureFixture) -> None:
    """It is asked on: `on_settled` comes, and then nothing of the decoder is left."""
    settled, closed = threading.Event(), threading.Event()
    with open_pair() as pair:
        listeners, real, deaf = pair.prefiller._hub._listeners, pair.prefiller._hear, threading.Event()
        at = listeners.index(real)
        listeners[at] = lambda message: deaf.is_set() or real(message)
        revoke = pair.decoder.ranks._revoke
        pair.decoder.ranks._revoke = lambda *args: closed.wait(LIMIT) and revoke(*args)  # type: ignore[assignment]
        job, pending = pair.start(on_settled=lambda _: settled.set())
        deaf.set()
        with caplog.at_level(logging.WARNING, "fabric.kvcache"):
            pair.decoder.close(timeout=0)
        assert "1 requests whose prefillers" in caplog.text
        assert str(pair.a.address).partition("#")[0] in caplog.text
        with pytest.raises(Cancelled):
            pending.wait()
        assert not settled.is_set()
        closed.set()
        assert settled.wait(LIMIT)
        until(lambda: pair.decoder.clock._closed)
        assert pair.decoder.in_flight == 0
        listeners[at] = real  # else it could not leave, and the hub would keep the engine
        job.abandon("over")


def test_a_closed_decoder_is_forgotten_while_its_engine_lives() -> None:
    with TransferEngine.open() as a, TransferEngine.open() as b, Prefiller(a, LAYOUT, pages=8, max_sessions=1) as p:
        for _ in range(3):
            with Decoder(b, LAYOUT, pages=8) as one:
                pending = one.submit(a.address, TOKENS, timeout=LIMIT)
                serve(p.next(LIMIT))
                pending.wait().release()
            until(lambda: not p._sessions)


def test_a_decoder_that_has_all_does_not_fail_the_job_by_closing() -> None:
    """Its goodbye may come before the prefiller has seen the end of its last write."""
    with open_pair() as pair:
        job, pending = pair.start()
        for layer in job.layers:
            job.push_layer(layer, 0, KV, KV)
        pending.wait().release()
        (target,) = job._targets
        target._busy += 1  # a completion that has not been seen yet
        target._over = False
        pair.prefiller._targets[target.session.id, target.request.epoch] = target
        target.session.targets += 1
        assert pair.prefiller._hear(Goodbye(target.session.id))
        assert target.error is None
        target._busy -= 1
        target._maybe_end()
        job.finish()


def test_a_decoder_that_closes_ends_the_job() -> None:
    with open_pair() as pair:
        job, pending = pair.start()
        job.push_layer(0, 0, KV, KV)
        heard: list[Cancel] = []
        pair.prefiller._cancel = heard.append  # type: ignore[assignment]
        pair.decoder.close(timeout=0)
        until(lambda: job.cancelled)
        with pytest.raises(Cancelled, match="has closed"), job:
            job.push_layer(1, 0, KV, KV)
        assert pending.wait_settled(LIMIT)
        assert heard


# ---- of a prefiller


def test_closing_a_prefiller_wakes_who_waits_for_a_request() -> None:
    with TransferEngine.open() as engine, Prefiller(engine, LAYOUT, pages=8) as prefiller:
        ends: list[str] = []

        def wait(call: Any, *args: Any) -> None:
            with pytest.raises(StaleHandle, match="prefiller is closed"):
                call(*args)
            ends.append("woken")

        threads = [
            threading.Thread(target=wait, args=args) for args in ((prefiller.next, 1e9), (prefiller.take, "x", 1e9))
        ]
        for thread in threads:
            thread.start()
        prefiller.close()
        for thread in threads:
            thread.join(LIMIT)
        assert ends == ["woken"] * 2
        with pytest.raises(StaleHandle):
            prefiller.next(0)


def test_a_closed_prefiller_is_known_to_be_and_its_next_life_is_found() -> None:
    """The engine lives, first as a decoder's, then as another prefiller's. Nobody waits for a deadline."""
    with open_pair() as pair:
        job, under_way = pair.start()
        job.push_layer(0, 0, KV, KV)
        other = Decoder(pair.a, LAYOUT, pages=8)
        pair.prefiller.close()
        with pytest.raises(PrefillRefused, match="the prefiller has closed"):
            under_way.wait()
        assert under_way.wait_settled(LIMIT)
        until(lambda: not pair.decoder.ranks._known)
        for _ in range(2):
            with pytest.raises(PrefillRefused, match="there is no prefiller at"):
                pair.ask().wait()
        job.abandon("over")
        until(lambda: not pair.decoder.ranks._writers)
        assert pair.decoder.pool.free == 16
        other.close()
        with Prefiller(pair.a, LAYOUT, pages=8) as again:
            pending = pair.ask()
            serve(again.next(LIMIT))
            pending.wait().release()


def test_what_was_written_before_a_prefiller_closed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word of its end may be heard before the last immediate. Here that one comes by itself, later."""
    monkeypatch.setattr(ranks, "_AFTERWARDS", LIMIT)
    with open_pair() as pair:
        job, pending = pair.start()
        (target,) = job._targets
        imm, slots = target.head.imm, target.session.slots
        target.writes += 1
        serve(job)
        pair.prefiller.close()
        until(lambda: not pair.decoder.ranks._known)
        assert not pending.done
        pair.a.submit_barrier(None, None, imm, [slots]).wait(LIMIT)
        pending.wait().release()


def test_a_request_that_was_never_heard_ends_when_the_prefiller_says_that_it_has_closed() -> None:
    with open_pair() as pair:
        job, first = pair.start()
        serve(job)
        first.wait().release()
        unheard: list[Ask] = []
        pair.prefiller._ask = unheard.append  # type: ignore[assignment]
        pending = pair.ask()
        until(lambda: bool(unheard))
        pair.prefiller.close()
        with pytest.raises(PrefillRefused, match="the prefiller has closed"):
            pending.wait()
        assert pending.wait_settled(LIMIT)
        assert pair.decoder.pool.free == 16


def test_a_request_that_comes_too_late_is_refused() -> None:
    """The prefiller has closed, and that is not known yet. Nobody is greeted again, where nobody is."""
    with open_pair() as pair, Decoder(pair.a, LAYOUT, pages=8):
        job, first = pair.start()
        serve(job)
        first.wait().release()
        pair.decoder.ranks._has_closed = lambda message: True  # type: ignore[method-assign]
        pair.prefiller.close()
        for _ in range(2):
            pending = pair.ask()
            with pytest.raises(PrefillRefused, match="there is no prefiller here any more"):
                pending.wait()
            assert pending.wait_settled(LIMIT)
        with Prefiller(pair.a, LAYOUT, pages=8) as again:
            pending = pair.ask()
            serve(again.next(LIMIT))
            pending.wait().release()


def test_a_closed_prefiller_confirms_cancels_until_its_last_write_has_ended() -> None:
    """Another listener of the engine must not say for it that nothing is under way."""
    with open_pair() as pair, Decoder(pair.a, LAYOUT, pages=8):
        job, pending = pair.start()
        (target,) = job._targets
        target._busy += 1  # a write that does not end
        pair.prefiller.close()
        pending.cancel()
        with pytest.raises((Cancelled, PrefillRefused)):
            pending.wait()
        assert not pending.wait_settled(0.3)
        with target._lock:
            target._busy -= 1
        target._maybe_end()
        assert pending.wait_settled(LIMIT)
        until(lambda: pair.prefiller._hear not in pair.prefiller._hub._listeners)


# ---- forgotten


def forget(prefiller: Prefiller) -> None:
    for session in list(prefiller._sessions.values()):
        prefiller._sessions.pop(session.id)
        session.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_decoder_that_was_forgotten_greets_again(tp: int) -> None:
    """Once for each prefill rank, within the request that finds it out."""
    engines = [TransferEngine.open() for _ in range(tp + 1)]
    sources = [Prefiller(engine, instance(tp), tp=n, pages=8, tail_bytes=4) for n, engine in enumerate(engines[1:])]
    with Decoder(engines[0], instance(1), pages=8, tail_bytes=4) as one:
        for turn in range(3):
            if turn:
                forget(sources[turn % tp])
            pending = one.submit([engine.address for engine in engines[1:]], TOKENS, timeout=LIMIT)
            for source in sources:
                job = source.next(LIMIT)
                with job:
                    for layer in job.layers:
                        job.push_layer(layer, 0, KV[: 2 // tp], KV[: 2 // tp])
                    if any(target.head.tail for target in job._targets):
                        job.push_tail(b"tail")
            with pending.wait() as kv:
                assert kv.tail == b"tail"
        assert one.in_flight == 0
        until(lambda: len(one.ranks._writers) == tp)
        assert len(one.ranks._sessions) == tp
    for source in sources:
        source.close()
    for engine in engines:
        engine.close()


def test_a_prefiller_that_forgets_all_the_time_is_not_greeted_for_ever() -> None:
    with open_pair() as pair:
        real = pair.prefiller._ask

        def forgetful(part: Any) -> None:
            forget(pair.prefiller)
            real(part)

        pair.prefiller._ask = forgetful  # type: ignore[method-assign]
        for _ in range(2):
            pending = pair.ask()
            with pytest.raises(PrefillRefused, match="does not know this decoder"):
                pending.wait()
            assert pending.wait_settled(LIMIT)
        assert pair.decoder.pool.free == 16
        until(lambda: not pair.decoder.ranks._writers)


def test_a_request_that_ends_while_it_greets_again_gives_its_pages_back() -> None:
    with open_pair() as pair:
        job, first = pair.start()
        serve(job)
        first.wait().release()
        forget(pair.prefiller)
        greeted = threading.Event()
        pair.prefiller._greet = lambda hello: greeted.set()  # type: ignore[method-assign]
        pending = pair.ask()
        assert greeted.wait(LIMIT)
        pending.cancel()
        with pytest.raises(Cancelled):
            pending.wait()
        assert pending.wait_settled(LIMIT)
        assert (pair.decoder.pool.free, pair.decoder.in_flight) == (16, 0)


# ---- of an engine before what is on it


def test_an_engine_closed_first_and_dropped_is_freed() -> None:
    """Whoever forgets to close a decoder and a prefiller, but closes the engine, gets its memory back."""
    engine = TransferEngine.open("cpu", "local")
    dropped = [weakref.ref(engine)]
    made = [Prefiller(engine, LAYOUT, pages=4), Decoder(engine, LAYOUT, pages=4)]
    dropped += map(weakref.ref, made)
    engine.close()
    del engine, made
    until(lambda: gc.collect() >= 0 and not any(ref() for ref in dropped))
