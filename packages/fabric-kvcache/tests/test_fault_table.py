"""Faults between real processes: immediates that are lost, late, doubled; completions that fail or never come.

The prefiller is a process of its own under FABRIC_FAULTS, the decoder meets other faults on its side. Whatever happens,
a request ends with all of its bytes or with a reason, no page stays away, and a healthy prefiller's request in the same
pages has its own bytes and no others. (One immediate too many may stand for a page still on its way. Then either
it is there when the decoder looks, or it is missed by its NaN, or the number was wrong in the end.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import prefill_peer as peer
import pytest
from peer_process import PEER
from test_transfer import LAYOUT, check, prompt

from fabric_core import DeadlineExceeded, PeerLost, TransferEngine
from fabric_kvcache import Decoder, KvDamaged, PrefillRefused

if TYPE_CHECKING:
    from peer_process import Peers

REASONS = (PrefillRefused, DeadlineExceeded, PeerLost, KvDamaged)
PAGES = 16  # two requests of 60 tokens
REQUESTS = 4
SLOW = "10"  # seconds between heartbeats: a starved machine is no dead peer


@pytest.mark.parametrize(
    ("faults", "mode", "ends"),
    [
        ("reorder,delay=2ms,partial=0.3,refuse=0.05:1ms,rnr=0.2,seed=1", "", "all well"),
        ("fail=0.2:EIO,seed=3", "", "all badly"),
        ("fail_late=0.2,reorder,delay=1ms,seed=4", "", "all badly"),
        ("drop=0.2,seed=5", "", "any"),
        ("seed=6", "double", "any"),
        ("reorder,delay=2ms,seed=7", "double", "any"),
    ],
    ids=["late", "lost", "done-and-failed", "never-completed", "doubled", "doubled-and-late"],
)
def test_between_processes_a_request_ends_with_its_bytes_or_with_a_reason(
    peers: Peers, faults: str, mode: str, ends: str
) -> None:
    words = ("1", "17", "float32", "256")
    bad = peers.run(PEER, f"bad-{ends[:3]}", *words, FABRIC_FAULTS=faults, FABRIC_HEARTBEAT=SLOW)
    well, told = 0, []
    with (
        TransferEngine.open(faults="reorder,delay=1ms,seed=2", heartbeat=float(SLOW)) as engine,
        Decoder(engine, LAYOUT, pages=PAGES, tail_bytes=peer.TAIL_BYTES, seed=3) as decoder,
    ):
        for number in range(REQUESTS):
            ids = prompt(60, seed=number, mode=mode)
            pending = decoder.submit(bad.address, ids, timeout=3.0 if "drop" in faults else 60.0)
            try:
                with pending.wait() as kv:
                    check(kv, LAYOUT, ids)
                    well += 1
            except REASONS as error:
                told.append(str(error))
            assert pending.wait_settled(60)
            assert decoder.pool.free == PAGES
        assert decoder.in_flight == 0
        assert all(str(bad.address) in reason for reason in told), "a reason without a name"
        assert ends == "any" or well == (REQUESTS if ends == "all well" else 0)
        good = peers()
        ids = prompt(PAGES * LAYOUT.page_tokens, seed=99)
        with decoder.submit(good.address, ids, timeout=60).wait() as kv:
            check(kv, LAYOUT, ids)
