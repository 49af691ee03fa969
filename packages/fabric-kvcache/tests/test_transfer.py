"""A decoder here, a prefiller in another process, and made-up layers: every byte arrives, or a clear error does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import prefill_peer as peer
import pytest

from fabric_core import BadRange, Cancelled, DeadlineExceeded, NetAddr, PeerLost, StaleHandle, TransferEngine
from fabric_kvcache import Decoder, KvDamaged, KvLayout, PoolExhausted, Prefiller, PrefillRefused, ReceivedKv

if TYPE_CHECKING:
    import peer_process

LAYOUT = peer.LAYOUT


def of(dtype: str) -> KvLayout:
    return KvLayout(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.head_dim, LAYOUT.page_tokens, dtype)


def prompt(tokens: int, seed: int = 0, mode: str = "") -> list[int]:
    """Token ids; `mode`: what the peer is to do with them."""
    ids = [int(x) for x in np.random.default_rng(seed).integers(0, 50_000, tokens)]
    return [peer.MODES[mode], *ids[1:]] if mode else ids


@contextmanager
def decoding(engine: TransferEngine, layout: KvLayout = LAYOUT, *, pages: int = 24, **how: Any) -> Iterator[Decoder]:
    with Decoder(engine, layout, pages=pages, tail_bytes=peer.TAIL_BYTES, seed=3, **how) as decoder:
        yield decoder


def check(kv: ReceivedKv, layout: KvLayout, ids: Sequence[int]) -> None:
    """Every byte of every layer, and the tail."""
    tokens = np.array(ids, dtype=np.uint32)
    for layer in range(layout.layers):
        keys, values = kv.layer(layer)
        expected = peer.fake_layer(layout, tokens, layer)
        assert np.array_equal(keys, expected[0]), f"keys of layer {layer}"
        assert np.array_equal(values, expected[1]), f"values of layer {layer}"
    assert kv.tail == peer.fake_tail(tokens, peer.TAIL_BYTES)


@pytest.mark.parametrize(
    ("dtype", "tokens", "chunk", "nics"), [("float32", 61, 0, 1), ("float32", 64, 17, 3), ("bfloat16", 61, 16, 2)]
)
def test_every_byte_arrives_from_another_process(
    peers: peer_process.Peers, dtype: str, tokens: int, chunk: int, nics: int
) -> None:
    """C4, C5: one immediate a page and one for the tail, over any number of NICs, in chunks or at once."""
    layout, ids = of(dtype), prompt(tokens)
    prefiller = peers(nics=nics, chunk=chunk, dtype=dtype)
    with TransferEngine.open(nics=nics) as engine, decoding(engine, layout) as decoder:
        with decoder.submit(prefiller.address, ids, timeout=60).wait() as kv:
            check(kv, layout, ids)
            # Without chunks that end inside a page, each page is one write; neighbours on both sides are merged.
            most = layout.layers * layout.pages_for(tokens) + 1
            assert layout.layers < kv.writes <= (most if not chunk or chunk % layout.page_tokens == 0 else 999)
            whole = layout.pages_for(tokens) * layout.page_bytes * layout.layers  # the last page is padded
            assert kv.nbytes == whole + peer.TAIL_BYTES
            assert decoder.pool.free == 24 - layout.pages_for(tokens)
        assert decoder.pool.free == 24
        assert decoder.pool.quarantined == 0


def test_many_requests_share_the_pool_and_are_not_mixed_up(peers: peer_process.Peers, engine: TransferEngine) -> None:
    prefillers = [peers(), peers(chunk=17, nics=3)]
    prompts = [prompt(5 + 3 * k, seed=k) for k in range(12)]
    with decoding(engine, pages=32) as decoder:
        for round_of in (prompts[:6], prompts[6:]):
            pending = [decoder.submit(prefillers[k % 2].address, ids, timeout=60) for k, ids in enumerate(round_of)]
            for one, ids in zip(pending, round_of, strict=True):
                with one.wait() as kv:
                    check(kv, LAYOUT, ids)
        assert decoder.pool.free == 32


def test_a_transfer_can_be_awaited(peers: peer_process.Peers, engine: TransferEngine) -> None:
    prefiller, prompts = peers(), [prompt(20, seed=k) for k in range(3)]

    async def both(decoder: Decoder) -> None:
        pending = [decoder.submit(prefiller.address, ids, timeout=60) for ids in prompts]
        for one, ids in zip(pending, prompts, strict=True):
            with await one as kv:
                check(kv, LAYOUT, ids)

    with decoding(engine) as decoder:
        asyncio.run(both(decoder))


def test_a_page_that_is_withheld_is_named_when_the_time_is_up(
    peers: peer_process.Peers, engine: TransferEngine
) -> None:
    """C3: the decoder does not start. The prefiller confirms that it has stopped, and the pages come back."""
    prefiller = peers()
    with decoding(engine) as decoder:
        pending = decoder.submit(prefiller.address, prompt(60, mode="withhold"), timeout=4.0)
        prefiller.hear("pushed")
        began = time.monotonic()
        assert not pending.done
        with pytest.raises(DeadlineExceeded) as caught:
            pending.wait()
        assert time.monotonic() - began < 4 + 30
        layer, page = peer.WITHHELD
        text = str(caught.value)
        assert f"1 of {LAYOUT.layers * 8} pages missing: layer {layer} page {page} " in text
        assert "tail" not in text
        assert str(prefiller.address) in text
        assert pending.wait_settled(20)
        assert (decoder.pool.quarantined, decoder.pool.free) == (0, 24)
        with pytest.raises(DeadlineExceeded):
            pending.wait()  # and so it stays


def test_a_prefiller_that_is_killed_in_the_middle_is_a_lost_peer(
    peers: peer_process.Peers, engine: TransferEngine
) -> None:
    """C11: found at once, not at the deadline, and named. Its right to write is revoked, and the pages come back."""
    prefiller = peers(shared=False)
    with decoding(engine) as decoder:
        pending = decoder.submit(prefiller.address, prompt(60, mode="stop"), timeout=60)
        prefiller.hear("half")
        assert not pending.done
        prefiller.kill()
        began = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            pending.wait()
        assert time.monotonic() - began < 40
        assert str(prefiller.address) in str(caught.value)
        assert f"{LAYOUT.layers * 4} of {LAYOUT.layers * 8} pages missing: layer 3 page 0 " in str(caught.value)
        assert "the tail is missing" in str(caught.value)
        assert pending.wait_settled(20), "its right to write was revoked"
        assert decoder.pool.free == 24


def test_a_prefiller_that_is_not_there_is_a_lost_peer(engine: TransferEngine) -> None:
    with decoding(engine) as decoder, pytest.raises(PeerLost, match="local:nobody-at-home"):
        decoder.submit(NetAddr.parse("local:nobody-at-home"), prompt(5), timeout=60).wait()


def test_a_refusal_ends_the_request_at_once_and_gives_the_pages_back(
    peers: peer_process.Peers, engine: TransferEngine
) -> None:
    """The prefiller's model fails after two layers; it refuses when its writes have ended, so the pages are clean."""
    prefiller = peers()
    with decoding(engine) as decoder:
        with pytest.raises(PrefillRefused, match="the model tripped"):
            decoder.submit(prefiller.address, prompt(60, mode="refuse"), timeout=60).wait()
        prefiller.hear("tripped")
        assert decoder.pool.free == 24
        ids = prompt(60, seed=1)
        with decoder.submit(prefiller.address, ids, timeout=60).wait() as kv:
            check(kv, LAYOUT, ids)


@pytest.mark.parametrize(
    ("layout", "tail_bytes", "tokens", "said"),
    [
        (KvLayout(6, 2, 16, 8), peer.TAIL_BYTES, 20, "KV heads of 3 and the destination 2"),
        (KvLayout(5, 3, 16, 8), peer.TAIL_BYTES, 20, "attention layers 0-5 and the destination 0-4"),
        (of("float16"), peer.TAIL_BYTES, 20, "type float32 and the destination float16"),
        (LAYOUT, 8, 20, "a tail of 8 bytes, the prefiller's has 1000"),
        (LAYOUT, peer.TAIL_BYTES, 8 * 257, "needs 257 pages, the prefiller has 256"),
    ],
    ids=["heads", "layers", "dtype", "tail", "room"],
)
def test_sides_that_do_not_fit_each_other_are_told_so(
    peers: peer_process.Peers, engine: TransferEngine, layout: KvLayout, tail_bytes: int, tokens: int, said: str
) -> None:
    with (
        Decoder(engine, layout, pages=257, tail_bytes=tail_bytes) as decoder,
        pytest.raises(PrefillRefused, match=said),
    ):
        decoder.submit(peers().address, prompt(tokens), timeout=60).wait()


def test_a_right_number_of_wrong_writes_is_found(peers: peer_process.Peers, engine: TransferEngine) -> None:
    """Counting alone would let the decoder start with a page that was never written."""
    prefiller = peers()
    with decoding(engine) as decoder:
        pending = decoder.submit(prefiller.address, prompt(60, mode="hurry"), timeout=60)
        with pytest.raises(KvDamaged, match=f"1 of {LAYOUT.layers * 8} pages missing: layer 4 page 2 "):
            pending.wait()
        prefiller.hear("pushed")
        assert pending.wait_settled(20)
        assert decoder.pool.free == 24


def test_a_prefiller_of_other_page_size_is_no_obstacle(peers: peer_process.Peers, engine: TransferEngine) -> None:
    layout, ids = KvLayout(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.head_dim, 5), prompt(61)
    with (
        decoding(engine, layout) as decoder,
        decoder.submit(peers(chunk=17, nics=3).address, ids, timeout=60).wait() as kv,
    ):
        check(kv, layout, ids)


def test_cancelling_is_confirmed_and_gives_the_pages_back(peers: peer_process.Peers, engine: TransferEngine) -> None:
    """The prefiller's own thread never comes back to the job: its callback thread confirms all the same."""
    prefiller = peers()
    with decoding(engine) as decoder:
        heard: list[str] = []
        pending = decoder.submit(
            prefiller.address,
            prompt(60, mode="stop"),
            timeout=60,
            on_done=lambda _: heard.append("done"),
            on_settled=lambda _: heard.append("settled"),
        )
        prefiller.hear("half")
        pending.cancel()
        with pytest.raises(Cancelled):
            pending.wait()
        assert pending.wait_settled(20)
        assert heard == ["done", "settled"]
        assert (decoder.pool.free, decoder.in_flight) == (24, 0)
        ids = prompt(150, seed=4)
        with decoder.submit(prefiller.address, ids, timeout=60).wait() as kv:
            check(kv, LAYOUT, ids)


def test_closing_a_decoder_ends_what_is_pending(peers: peer_process.Peers, engine: TransferEngine) -> None:
    prefiller = peers()
    with decoding(engine) as decoder:
        pending = decoder.submit(prefiller.address, prompt(60, mode="stop"), timeout=60)
        prefiller.hear("half")
    with pytest.raises(Cancelled):
        pending.wait()
    assert pending.settled


def test_a_prompt_longer_than_many_messages_arrives(engine: TransferEngine) -> None:
    """100,000 tokens and 25,000 pages: half a megabyte of numbers, where a message takes 64 KiB."""
    layout, tokens = KvLayout(1, 1, 1, 4, "float8_e4m3"), 100_000
    ids = np.arange(tokens, dtype=np.uint32)
    assert engine.max_message < ids.nbytes
    with (
        TransferEngine.open() as other,
        Prefiller(other, layout, pages=25_000) as prefiller,
        Decoder(engine, layout, pages=25_000, seed=1) as decoder,
    ):
        pending = decoder.submit(other.address, ids, timeout=30)
        with prefiller.next(60) as job:
            assert np.array_equal(job.tokens, ids)
            keys = (ids % 251).astype(np.uint8).reshape(1, tokens, 1)
            for first in range(0, tokens, 33_333):
                part = keys[:, first : first + 33_333]
                job.push_layer(0, first, part, part)
        with pending.wait() as kv:
            assert np.array_equal(kv.layer(0)[0], keys)


def test_a_request_that_makes_no_sense_costs_no_page(engine: TransferEngine) -> None:
    with decoding(engine) as decoder:
        cases: list[dict[str, Any]] = [
            {"prompt": []},
            {"prompt": 0},
            {"prompt": [-1]},
            {"prompt": 5, "start": 5},
            {"prompt": 5, "timeout": 0},
            {"prompt": 5, "tables": [[99]]},
            {"prompt": 5, "prefiller": []},
        ]
        for wrong in cases:
            with pytest.raises(BadRange):
                decoder.submit(**{"prefiller": "local:nobody", **wrong})
        assert decoder.pool.free == decoder.pool.pages
        assert decoder.slots.free == decoder.slots.count
        with pytest.raises(PoolExhausted, match="24 are free and 0 in quarantine"):
            decoder.submit("local:nobody", 25 * 8)


def test_what_was_released_cannot_be_read(peers: peer_process.Peers, engine: TransferEngine) -> None:
    with decoding(engine) as decoder:
        kv = decoder.submit(peers().address, prompt(9), timeout=60).wait()
        kv.release()
        kv.release()
        for read in (lambda: kv.layer(0), lambda: kv.tail):
            with pytest.raises(StaleHandle):
                read()
        assert decoder.pool.free == 24
