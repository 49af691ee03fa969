"""What a caller, or a peer, gets wrong is refused at once, with the value and the cure, and costs nothing."""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from kv_pair import KV, LAYOUT, LIMIT, TOKENS, instance, open_pair, serve, until

from fabric_core import BadRange, ConfigError, ProtocolError, TransferEngine, WaitTimeout
from fabric_kvcache import Decoder, PagePool, Prefiller, PrefillRefused, cli_bench, hub, prefiller
from fabric_kvcache.clock import Clock
from fabric_kvcache.protocol import VERSION, Ask, Hello, decode, encode
from fabric_kvcache.slots import SlotPool


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"start": 1 << 70}, "start="),
        ({"start": 1.5}, r"start=1\.5"),
        ({"seed": 1 << 63}, "seed=9223372036854775808"),
        ({"seed": "x"}, "seed='x'"),
        ({"request_id": "\ud800"}, "UTF-8"),
        ({"request_id": ""}, "1 to 128"),
        ({"request_id": 7}, "request_id=7"),
        ({"request_id": "x" * 129}, "1 to 128"),
        ({"timeout": math.nan}, "timeout=nan"),
        ({"timeout": "1"}, "timeout='1'"),
        ({"timeout": math.inf}, "at most a day"),
        ({"prompt": 1.5}, r"prompt=1\.5"),
        ({"prompt": [[1, 2]]}, "shape"),
        ({"prompt": "ab"}, "prompt='ab'"),
        ({"prefiller": 5}, "prefiller=5"),
        ({"tables": [[0, 1, 2]]}, "leave tables out"),
    ],
    ids=repr,
)
def test_an_argument_that_is_none_is_named(wrong: dict[str, Any], said: str) -> None:
    """The tables: this decoder hands out its own pages, and would give them to another request as well."""
    with TransferEngine.open() as engine, Decoder(engine, LAYOUT, pages=16) as decoder:
        with pytest.raises(BadRange, match=said):
            decoder.submit(**{"prefiller": "local:nobody", "prompt": range(TOKENS), **wrong})
        assert (decoder.pool.free, decoder.slots.free, decoder.in_flight) == (16, decoder.slots.count, 0)


def test_numbers_of_numpy_are_numbers() -> None:
    with open_pair() as pair:
        for how in ({"start": np.int64(1)}, {"seed": np.uint8(3)}, {"timeout": np.float32(60)}, {"start": True}):
            job, pending = pair.start(**how)
            serve(job)
            pending.wait().release()
        pending = pair.decoder.submit(pair.a.address, np.int64(TOKENS))  # type: ignore[arg-type]
        serve(pair.prefiller.next(LIMIT))
        pending.wait().release()


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, 1e12])
def test_a_confirmation_is_waited_for_at_most_a_day(seconds: float) -> None:
    with TransferEngine.open() as engine, pytest.raises(ConfigError, match="confirm_timeout"):
        Decoder(engine, LAYOUT, pages=4, confirm_timeout=seconds)


def test_a_clock_survives_what_is_far_away() -> None:
    """A thread cannot sleep for that long at once."""
    clock, called = Clock("test-clock"), threading.Event()
    try:
        clock.call(1e12, lambda: None)
        clock.call(math.inf, lambda: None)
        clock.call(0.05, called.set)
        assert called.wait(LIMIT)
        again = threading.Event()
        clock.call(0.01, again.set)
        assert again.wait(LIMIT)
    finally:
        clock.close()


def test_a_time_to_wait_is_a_number() -> None:
    with open_pair() as pair:
        for wrong in (math.nan, None, "1"):
            with pytest.raises(BadRange, match="timeout="):
                pair.prefiller.next(wrong)  # type: ignore[arg-type]
        with pytest.raises(BadRange, match="request_id=None"):
            pair.prefiller.take(None, 1)  # type: ignore[arg-type]
        with pytest.raises(WaitTimeout):
            pair.prefiller.next(-1)
        with pytest.raises(BadRange, match="timeout=nan"):
            pair.decoder.close(math.nan)  # and is as open as before
        pending = pair.ask()
        serve(pair.prefiller.next(math.inf))
        with pytest.raises(BadRange, match="timeout=nan"):
            pending.wait(math.nan)
        with pytest.raises(BadRange, match="timeout=nan"):
            pending.wait_settled(math.nan)
        pending.wait(math.inf).release()
        assert pending.wait_settled(math.inf)


@pytest.mark.parametrize(
    "field", [{"request_id": "\ud800"}, {"seed": 1 << 70}, {"start": True}, {"epoch": 1.5}], ids=repr
)
def test_what_cannot_be_encoded_is_a_protocol_error(field: dict[str, Any]) -> None:
    ask = Ask(1, 2, "r", b"a", 3, 0, 9, False, (), False, 0, 0, 5, 6, 1000, 0, b"")
    with pytest.raises(ProtocolError, match="no peer would take"):
        encode(msgspec.structs.replace(ask, **field))


@pytest.mark.parametrize("given", ["inf", "nan", "-1", "1e9"])
def test_a_compute_time_that_is_none_is_a_usage_error(given: str) -> None:
    with pytest.raises(ConfigError, match="--compute-us"):
        cli_bench._question("qwen3-235b", "", 1024, chunk_tokens=0, layers=1, compute_us=float(given))


# ---- one engine, one prefiller


def test_a_second_prefiller_is_refused_before_it_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pair() as pair:
        monkeypatch.setattr(prefiller, "PagePool", None)
        with pytest.raises(ConfigError, match="one rank, one engine"):
            Prefiller(pair.a, LAYOUT, pages=8)


def test_what_fails_half_made_keeps_no_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    for kind in (PagePool, SlotPool):
        monkeypatch.setattr(kind, "close", lambda self, timeout=5.0: closed.append(type(self).__name__))

    def fail(*_: object, **__: object) -> None:
        raise ConfigError("no room to listen")

    monkeypatch.setattr(hub, "join", fail)
    with TransferEngine.open() as engine:
        for role in (Prefiller, Decoder):
            with pytest.raises(ConfigError, match="no room"):
                role(engine, LAYOUT, pages=8)
    assert closed == ["SlotPool", "SlotPool", "PagePool", "SlotPool", "PagePool"]


# ---- two decode instances, one request id


def test_instances_of_one_rank_do_not_share_their_ids() -> None:
    with TransferEngine.open() as c, open_pair() as pair, Decoder(c, LAYOUT, pages=16) as other:
        first = pair.ask(request_id="r")
        second = other.submit(pair.a.address, [7] * TOKENS, timeout=LIMIT, request_id="r")
        until(lambda: len(pair.prefiller._whole) == 2)
        for _ in range(2):
            job = pair.prefiller.take("r", LIMIT)
            serve(job, float(job.tokens[0]))
        for pending, value in ((first, 0.0), (second, 7.0)):
            with pending.wait() as kv:
                assert (kv.layer(1)[0].view(np.float32) == value).all()


@pytest.mark.parametrize("named", [False, True])
def test_ranks_of_two_instances_are_not_put_together(named: bool) -> None:
    """Rank 0 of one, rank 1 of the other, the same id. Named, they are apart; else nobody gets the other's KV."""
    with TransferEngine.open() as a, Prefiller(a, instance(1), pages=16) as source:
        engines = [TransferEngine.open() for _ in range(4)]
        decoders = [
            Decoder(engines[2 * n + tp], instance(2), tp=tp, pages=16, instance=str(n) if named else None)
            for n in (0, 1)
            for tp in (0, 1)
        ]
        prompts = [[1] * TOKENS, [2] * TOKENS]
        first = decoders[0].submit(a.address, prompts[0], request_id="r", timeout=LIMIT)
        until(lambda: len(source._targets) == 1)
        fourth = decoders[3].submit(a.address, prompts[1], request_id="r", timeout=LIMIT)
        until(lambda: len(source._targets) == 2)
        if not named:
            with pytest.raises(WaitTimeout):
                source.next(0)
            for pending in (first, fourth):
                with pytest.raises(PrefillRefused, match=r"different prompts.*instance="):
                    pending.wait()
        else:
            second = decoders[1].submit(a.address, prompts[0], request_id="r", timeout=LIMIT)
            third = decoders[2].submit(a.address, prompts[1], request_id="r", timeout=LIMIT)
            for _ in range(2):
                job = source.next(LIMIT)
                serve(job, float(job.tokens[0]))
            for pending, value in ((first, 1.0), (second, 1.0), (third, 2.0), (fourth, 2.0)):
                with pending.wait() as kv:
                    assert (kv.layer(0)[0].view(np.float32) == value).all()
        for decoder in decoders:
            decoder.close()
        for engine in engines:
            engine.close()


def test_another_decoder_at_the_same_rank_does_not_take_a_request_over() -> None:
    """The first one is not stopped for it."""
    with (
        TransferEngine.open() as a,
        TransferEngine.open() as b,
        TransferEngine.open() as c,
        Prefiller(a, instance(1), pages=16) as source,
        Decoder(b, instance(2), pages=16) as mine,
        Decoder(c, instance(2), pages=16) as theirs,
    ):
        first = mine.submit(a.address, TOKENS, request_id="r", timeout=LIMIT)
        until(lambda: len(source._targets) == 1)
        with pytest.raises(PrefillRefused, match=r"asks for it too, as the same rank \(TP 0 PP 0\).*instance="):
            theirs.submit(a.address, TOKENS, request_id="r", timeout=LIMIT).wait()
        assert not first.done
        again = mine.submit(a.address, TOKENS, request_id="r", timeout=LIMIT)  # the same decoder may
        with pytest.raises(Exception, match="asked again"):
            first.wait()
        again.cancel()


# ---- what a peer gets wrong


def test_another_version_hears_at_once_that_it_is_another_one() -> None:
    """In its own version, so that it understands."""
    heard: queue.Queue[bytes] = queue.Queue()
    with open_pair() as pair, TransferEngine.open() as stranger:
        decoder, slots = pair.decoder, pair.decoder.slots
        hello = encode(
            Hello(
                77, 1, stranger.address.to_bytes(), decoder.shard.layout, 0, 0, decoder.shard.pool_pages, (),
                decoder.pool.desc.to_bytes(), slots.desc.to_bytes(), 0, "",
            )
        )  # fmt: skip
        receives = stranger.submit_recvs(4096, 2, lambda data: heard.put(bytes(data)))
        stranger.submit_send(pair.a.address, hello[:3] + bytes([VERSION + 5]) + hello[4:]).wait(LIMIT)
        answer = heard.get(timeout=LIMIT)
        receives.close()
        assert answer[:4] == b"fkv" + bytes([VERSION + 5])
        message = decode(answer[:3] + bytes([VERSION]) + answer[4:])
        assert message.nonce == 77  # type: ignore[union-attr]
        assert f"version {VERSION + 5}" in message.reason  # type: ignore[union-attr]
        assert f"version {VERSION};" in message.reason  # type: ignore[union-attr]
        for rest in (b"", b"\xc1", b"\x93\x01\x02\x03", hello[4:30]):  # no greeting, so no answer and no harm
            pair.b.submit_send(pair.a.address, b"fkv" + bytes([VERSION + 5]) + rest).wait(LIMIT)
        job, pending = pair.start()
        serve(job)
        pending.wait().release()


@pytest.mark.parametrize("where", ["seal_offset", "tail_offset"])
def test_a_request_cannot_point_outside_the_memory_for_seals_and_tails(where: str) -> None:
    with open_pair() as pair:
        job, pending = pair.start()
        (target,) = job._targets
        session, limit = target.session, target.session.slots.nbytes
        head = msgspec.structs.replace(target.head, tail=True)
        assert session.wrong(head, target.request) is None
        session.tail_bytes = 8
        for offset, fits in ((limit - 24, True), (limit - 7, False), (limit, False), (1 << 62, False)):
            wrong = session.wrong(msgspec.structs.replace(head, **{where: offset}), target.request)
            assert (wrong is None) == fits, (offset, wrong)
        session.tail_bytes = 0
        table = target.request.tables[0].copy()
        table[0] = 99
        assert "page 99" in str(session.wrong(head, dataclasses.replace(target.request, tables=(table,))))
        for layer in job.layers:
            job.push_layer(layer, 0, KV, KV)
        job.finish()
        pending.wait().release()
