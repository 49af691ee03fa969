"""fabric-ibverbs on real queue pairs: one path of several, and what a path can carry.

Needs software RDMA devices as tools/rdma-guest makes them (`make test-verbs`); skipped elsewhere.
"""

from __future__ import annotations

import pytest
from verbs_rig import (
    DEADLINE,
    acknowledgements_lost,
    connect,
    environment,
    eventually,
    need,
    open_on,
    pattern,
    run,
)

from fabric_core import NicLost, Pages, TransferEngine, TransferError
from fabric_core.conformance.kit import Calls, Memory

pytestmark = [pytest.mark.nic, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def _devices() -> None:
    need(2)


def test_a_path_that_the_receiver_gives_up_is_not_the_peer(opened: list[TransferEngine]) -> None:
    """R8, decision 0007: over one of two paths our acknowledgements are lost, and with them those of the receiver's
    credits. It gives the path up and says so: the path is lost, the peer is not, and the other NIC goes on."""
    need(4)
    with environment(FABRIC_VERBS_TIMEOUT="14"):  # all resends within 0.5 s: long before a heartbeat is missed
        opened += [open_on("rxe0", "rxe1", heartbeat=30), open_on("rxe2", "rxe3", heartbeat=30)]
    a, b = opened
    source, target = connect(a, b)
    imm, pages = b.alloc_imm(), Pages([0] * 400, 0)
    path, peer, failed = Calls(), Calls(), Calls()
    a.on_error, a.on_peer_lost = path, peer

    def lost() -> bool:
        try:
            a.submit_paged_writes(8, imm, (source.handle, pages), (target.desc, pages)).wait(DEADLINE)
        except TransferError as error:
            failed(error)
        return bool(path.count or peer.count or failed.count)

    with acknowledgements_lost("rxe1"):
        eventually(lost, "the receiver gives the path up")
        for _ in range(3):
            a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), nic=0).wait(DEADLINE)
    assert peer.count == 0, (peer.firsts, path.firsts, failed.firsts)
    assert {error.code for error in [*path.firsts, *failed.firsts]} == {"ETIMEDOUT"}, (path.firsts, failed.firsts)
    assert all(isinstance(error, NicLost) for error in path.firsts), path.firsts


def test_an_interface_whose_mtu_shrank_is_asked_again(pair: tuple[TransferEngine, TransferEngine]) -> None:
    """What a port can carry is asked for each link: by what it could at the start, large writes would be lost."""
    a, b = pair
    run("ip", "link", "set", "nic0", "mtu", "1500")
    try:
        for one, other in ((a, b), (b, a)):
            source, target = Memory(one, 65536, pattern(1, 65536)), Memory(other, 65536)
            one.submit_single_write(65536, None, (source.handle, 0), (target.desc, 0)).wait(DEADLINE)
            assert target.get() == pattern(1, 65536)
    finally:
        run("ip", "link", "set", "nic0", "mtu", "9000")
