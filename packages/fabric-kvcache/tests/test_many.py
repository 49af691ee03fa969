"""Tens of thousands of requests in flight at one decoder: all of them end right, and nothing is kept of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fabric_core import Cancelled, PeerLost, TransferEngine
from fabric_kvcache import Decoder, KvLayout

if TYPE_CHECKING:
    from peer_process import Peers

COUNT, CANCELLED, SERVED = 20_000, 300, 300
MANY = Path(__file__).parent / "many_peer.py"
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=4, page_tokens=2)


def resident() -> int:
    """Bytes of this process's memory that are its own."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_twenty_thousand_requests_in_flight(peers: Peers) -> None:
    """Some are cancelled while they wait, some are served, and then the prefiller is killed under all the others."""
    prefiller = peers.run(MANY, str(COUNT))
    with (
        TransferEngine.open(imm_slots=1 << 17, timeout=120) as engine,
        Decoder(engine, LAYOUT, pages=COUNT, tail_bytes=8, max_requests=COUNT, verify=False) as decoder,
    ):
        before = resident()
        pending = [decoder.submit(prefiller.address, [k], timeout=200) for k in range(COUNT)]
        assert decoder.in_flight == COUNT
        prefiller.tell(f"{COUNT} 0")
        prefiller.hear(f"waiting {COUNT}")
        assert resident() - before < COUNT * 16384, "16 KiB a request, and no more"
        prefiller.hear(f"left {COUNT} {COUNT} 64")
        for one in pending[-CANCELLED:]:
            one.cancel()
        for one in pending[-CANCELLED:]:
            assert one.wait_settled(60)
            with pytest.raises(Cancelled):
                one.wait()
        rest = COUNT - CANCELLED - SERVED
        prefiller.tell(f"{COUNT - CANCELLED} {SERVED}")
        prefiller.hear(f"waiting {COUNT - CANCELLED}")
        prefiller.hear(f"left {rest} {rest} 64")
        end = time.monotonic() + 60
        while sum(one.done for one in pending[:-CANCELLED]) < SERVED:  # what has landed is seen by and by
            assert time.monotonic() < end
        served = 0
        for k, one in enumerate(pending[:-CANCELLED]):
            if one.done:
                served += 1
                with one.wait() as kv:
                    assert kv.tail == np.uint64(k).tobytes()
                    assert kv.layer(0)[0].view(np.float32).tolist() == [[[k] * 4]]
        assert served == SERVED
        prefiller.kill()
        lost = 0
        for one in pending[:-CANCELLED]:
            try:
                one.wait()
            except PeerLost:
                lost += 1
            assert one.wait_settled(60)
        assert lost == rest
        assert (decoder.in_flight, decoder.pool.free, decoder.slots.free) == (0, COUNT, COUNT)
        assert not decoder.ranks._known
        assert not decoder.ranks._sessions
