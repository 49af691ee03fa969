"""A prefiller that leaves when it has written everything: its loss may be known before its immediates are seen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from fabric_core import PeerLost, TransferEngine
from fabric_kvcache import Decoder, KvLayout, Prefiller

LAYOUT = KvLayout(2, 1, 8, 8, "float32")
TOKENS = 16
LIMIT = 60.0


@contextmanager
def busy_callbacks(engine: TransferEngine) -> Iterator[None]:
    """The callback thread of `engine` does something else meanwhile."""
    inside, over = threading.Event(), threading.Event()
    imm = engine.alloc_imm()

    def stay(_: object) -> None:
        inside.set()
        over.wait(LIMIT)

    engine.expect_imm_count(imm, 0, stay, timeout=LIMIT)
    assert inside.wait(LIMIT)
    try:
        yield
    finally:
        over.set()
        engine.free_imm(imm)


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_lost_prefiller_has_written_counts(whole: bool) -> None:
    kv = np.arange(TOKENS * 8, dtype=np.float32).reshape(1, TOKENS, 8)
    with (
        TransferEngine.open(backend="local", nics=1) as there,
        TransferEngine.open(backend="local", nics=1) as here,
        Prefiller(there, LAYOUT, pages=8, tail_bytes=4) as prefiller,
        Decoder(here, LAYOUT, pages=8, tail_bytes=4, seed=1) as decoder,
    ):
        pending = decoder.submit(there.address, list(range(TOKENS)), timeout=LIMIT)
        job = prefiller.next(LIMIT)
        (rank,) = pending._sources
        with busy_callbacks(here):
            for layer in job.layers:
                job.push_layer(layer, 0, kv, kv)
            if whole:
                job.push_tail(b"tail")
                job.finish()  # all of it is written, and counted there
            decoder.ranks.lost(rank, PeerLost("the peer is gone", peer=str(there.address), code="ECONNRESET"))
            if whole:
                with pending.wait(LIMIT) as received:
                    assert received.layer(0)[0].tobytes() == kv.tobytes()
                    assert received.tail == b"tail"
            else:
                with pytest.raises(PeerLost, match="before all KV had arrived; "):
                    pending.wait(LIMIT)
        if not whole:
            job.abandon("the test is over")
