"""A decoder here, a prefiller in another process, and made-up layers: every byte arrives, or a clear error does."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fabric_core import BadRange, Cancelled, DeadlineExceeded, NetAddr, PeerLost, StaleHandle, TransferEngine
from fabric_kvcache import Decoder, KvDamaged, KvLayout, PoolExhausted, PrefillRefused, ReceivedKv

if TYPE_CHECKING:
    import conftest
    import peer
else:
    spec = importlib.util.spec_from_file_location("kvcache_test_peer", Path(__file__).parent / "peer.py")
    peer = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = peer
    spec.loader.exec_module(peer)

LAYOUT = peer.LAYOUT


def of(dtype: str) -> KvLayout:
    return KvLayout(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.head_dim, LAYOUT.page_tokens, dtype)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, 50_000, tokens)]


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


@pytest.mark.parametrize("nics", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "tokens", "chunk"), [("float32", 61, 0), ("float32", 64, 16), ("bfloat16", 61, 24), ("float8_e4m3", 1, 0)]
)
def test_every_byte_arrives_from_another_process(
    peers: conftest.Peers, nics: int, dtype: str, tokens: int, chunk: int
) -> None:
    """C4, C5: one immediate a page and one for the tail, over any number of NICs, in chunks or at once."""
    layout, ids = of(dtype), prompt(tokens)
    prefiller = peers(nics=nics, chunk=chunk, dtype=dtype)
    with TransferEngine.open(nics=nics) as engine, decoding(engine, layout) as decoder:
        with decoder.submit(prefiller.address, ids, timeout=20).wait() as kv:
            check(kv, layout, ids)
            assert kv.writes == layout.layers * layout.pages_for(tokens) + 1
            assert kv.nbytes == (kv.writes - 1) * layout.page_bytes + peer.TAIL_BYTES
            assert decoder.pool.free == 24 - layout.pages_for(tokens)
        assert decoder.pool.free == 24
        assert decoder.pool.quarantined == 0
        prefiller.hear("served")


def test_many_requests_share_the_pool_and_are_not_mixed_up(peers: conftest.Peers, engine: TransferEngine) -> None:
    prefillers = [peers(), peers()]
    prompts = [prompt(5 + 3 * k, seed=k) for k in range(12)]
    with decoding(engine, pages=32) as decoder:
        for round_of in (prompts[:6], prompts[6:]):
            pending = [decoder.submit(prefillers[k % 2].address, ids, timeout=20) for k, ids in enumerate(round_of)]
            for one, ids in zip(pending, round_of, strict=True):
                with one.wait() as kv:
                    check(kv, LAYOUT, ids)
        assert decoder.pool.free == 32


def test_a_transfer_can_be_awaited(peers: conftest.Peers, engine: TransferEngine) -> None:
    prefiller, prompts = peers(), [prompt(20, seed=k) for k in range(3)]

    async def both(decoder: Decoder) -> None:
        pending = [decoder.submit(prefiller.address, ids, timeout=20) for ids in prompts]
        for one, ids in zip(pending, prompts, strict=True):
            with await one as kv:
                check(kv, LAYOUT, ids)

    with decoding(engine) as decoder:
        asyncio.run(both(decoder))


def test_a_page_that_is_withheld_is_named_when_the_time_is_up(peers: conftest.Peers, engine: TransferEngine) -> None:
    """C3: the decoder does not start; its pages are not used again."""
    prefiller = peers("withhold")
    with decoding(engine) as decoder:
        pending = decoder.submit(prefiller.address, prompt(60), timeout=1.5)
        prefiller.hear("pushed")
        began = time.monotonic()
        assert not pending.done
        with pytest.raises(DeadlineExceeded) as caught:
            pending.wait()
        assert time.monotonic() - began < 3
        layer, page = peer.WITHHELD
        text = str(caught.value)
        assert f"1 of {LAYOUT.layers * 8} pages missing: layer {layer} page {page} " in text
        assert "tail" not in text
        assert str(prefiller.address) in text
        assert decoder.pool.quarantined == 8
        assert decoder.pool.free == 16
        with pytest.raises(DeadlineExceeded):
            pending.wait()  # and so it stays


def test_a_prefiller_that_is_killed_in_the_middle_is_a_lost_peer(peers: conftest.Peers, engine: TransferEngine) -> None:
    """C11: found at once, not at the deadline, and named."""
    prefiller = peers("stop")
    with decoding(engine) as decoder:
        pending = decoder.submit(prefiller.address, prompt(60), timeout=60)
        prefiller.hear("half")
        assert not pending.done
        prefiller.kill()
        began = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            pending.wait()
        assert time.monotonic() - began < 10
        assert str(prefiller.address) in str(caught.value)
        assert f"{LAYOUT.layers * 4} of {LAYOUT.layers * 8} pages missing: layer 3 page 0 " in str(caught.value)
        assert "the tail is missing" in str(caught.value)
        assert decoder.pool.quarantined == 8


def test_a_prefiller_that_is_not_there_is_a_lost_peer(engine: TransferEngine) -> None:
    with decoding(engine) as decoder, pytest.raises(PeerLost, match="local:nobody-at-home"):
        decoder.submit(NetAddr.parse("local:nobody-at-home"), prompt(5), timeout=20).wait()


def test_a_refusal_ends_the_request_at_once_and_gives_the_pages_back(
    peers: conftest.Peers, engine: TransferEngine
) -> None:
    """The prefiller's model fails after two layers; it refuses when its writes have ended, so the pages are clean."""
    prefiller = peers("refuse")
    with decoding(engine) as decoder:
        with pytest.raises(PrefillRefused, match="the model tripped"):
            decoder.submit(prefiller.address, prompt(60), timeout=20).wait()
        assert decoder.pool.free == 24
        ids = prompt(60, seed=1)
        with decoder.submit(prefiller.address, ids, timeout=20).wait() as kv:
            check(kv, LAYOUT, ids)


@pytest.mark.parametrize(
    ("layout", "tail_bytes", "tokens", "said"),
    [
        (KvLayout(6, 3, 16, 16), peer.TAIL_BYTES, 20, "16 tokens a page, float32; .*8 tokens a page, float32"),
        (of("float16"), peer.TAIL_BYTES, 20, "float16; the prefiller's is .* float32"),
        (LAYOUT, 8, 20, "a tail of 8 bytes, the prefiller's has 1000"),
        (LAYOUT, peer.TAIL_BYTES, 100, "needs 13 pages, the prefiller has 4"),
    ],
    ids=["page", "dtype", "tail", "room"],
)
def test_sides_that_do_not_fit_each_other_are_told_so(
    peers: conftest.Peers, engine: TransferEngine, layout: KvLayout, tail_bytes: int, tokens: int, said: str
) -> None:
    prefiller = peers(pages=4)
    with (
        Decoder(engine, layout, pages=24, tail_bytes=tail_bytes) as decoder,
        pytest.raises(PrefillRefused, match=said),
    ):
        decoder.submit(prefiller.address, prompt(tokens), timeout=20).wait()


def test_a_right_number_of_wrong_writes_is_found(peers: conftest.Peers, engine: TransferEngine) -> None:
    """Counting alone would let the decoder start with a page that was never written."""
    prefiller = peers("hurry")
    with decoding(engine) as decoder:
        with pytest.raises(KvDamaged, match=f"1 of {LAYOUT.layers * 8} pages missing: layer 4 page 2 "):
            decoder.submit(prefiller.address, prompt(60), timeout=20).wait()
        assert decoder.pool.quarantined == 8


def test_writes_that_come_after_the_end_touch_no_other_request(peers: conftest.Peers, engine: TransferEngine) -> None:
    """The pages of a request that ran out of time are quarantined, its immediate counts for nobody."""
    prefiller = peers("late")
    with decoding(engine) as decoder:
        late = decoder.submit(prefiller.address, prompt(60), timeout=1.0)
        prefiller.hear("held")
        with pytest.raises(DeadlineExceeded, match="none of 48 pages has arrived"):
            late.wait()
        ids = prompt(100, seed=5)
        next_one = decoder.submit(prefiller.address, ids, timeout=20)
        prefiller.tell()
        prefiller.hear("written")
        with next_one.wait() as kv:
            check(kv, LAYOUT, ids)
            assert not set(kv.pages.tolist()) & set(late._lease.pages.tolist())
        assert not late._lease.missing(), "the late writes did land, in pages that nobody uses"
        with pytest.raises(PoolExhausted, match="16 are free and 8 in quarantine"):
            decoder.submit(prefiller.address, prompt(17 * 8), timeout=20)


def test_cancelling_ends_the_wait_and_keeps_the_pages_out_of_use(peers: conftest.Peers, engine: TransferEngine) -> None:
    prefiller = peers("stop")
    with decoding(engine) as decoder:
        pending = decoder.submit(prefiller.address, prompt(60), timeout=60)
        prefiller.hear("half")
        pending.cancel()
        with pytest.raises(Cancelled):
            pending.wait()
        assert decoder.pool.quarantined == 8


def test_closing_a_decoder_ends_what_is_pending(peers: conftest.Peers, engine: TransferEngine) -> None:
    prefiller = peers("stop")
    with decoding(engine) as decoder:
        pending = decoder.submit(prefiller.address, prompt(60), timeout=60)
        prefiller.hear("half")
    with pytest.raises(Cancelled):
        pending.wait()


def test_a_request_that_cannot_be_sent_is_refused_and_costs_no_page(engine: TransferEngine) -> None:
    tokens = engine.max_message // 4
    with decoding(engine, pages=LAYOUT.pages_for(tokens)) as decoder:
        with pytest.raises(BadRange, match=str(engine.max_message)):
            decoder.submit(NetAddr.parse("local:nobody"), [0] * tokens)
        with pytest.raises(BadRange, match="without a token"):
            decoder.submit(NetAddr.parse("local:nobody"), [])
        assert decoder.pool.free == decoder.pool.pages


def test_what_was_released_cannot_be_read(peers: conftest.Peers, engine: TransferEngine) -> None:
    with decoding(engine) as decoder:
        kv = decoder.submit(peers().address, prompt(9), timeout=20).wait()
        kv.release()
        kv.release()
        for read in (lambda: kv.layer(0), lambda: kv.tail):
            with pytest.raises(StaleHandle):
                read()
        assert decoder.pool.free == 24
