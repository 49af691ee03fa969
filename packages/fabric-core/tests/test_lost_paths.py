"""What a program is told when one path of several goes silent: a NIC's loss, never a peer's (decision 0007)."""

from __future__ import annotations

from fabric_core import NicLost, TransferEngine, faults
from fabric_core.conformance.kit import Calls, Memory, finish, pattern


def test_a_path_that_goes_silent_is_told_as_a_lost_nic_that_names_nic_and_peer() -> None:
    """R8: on_error hears NicLost, as of a NIC that is gone; on_peer_lost hears nothing, and work goes on."""
    heard, peers = Calls(), Calls()
    with TransferEngine.open(nics=2, faults="seed=1") as engine, TransferEngine.open(nics=2) as peer:
        engine.on_error, engine.on_peer_lost = heard, peers
        source, target = Memory(engine, 1 << 18, pattern(1, 1 << 18)), Memory(peer, 1 << 18)

        def write() -> None:
            finish([engine.submit_single_write(1 << 18, None, (source.handle, 0), (target.desc, 0))])

        write()
        faults.control(engine).cut(peer.name, 1)
        (lost,) = heard.wait(1)
        assert isinstance(lost, NicLost), repr(lost)
        assert (lost.nic, lost.peer) == (engine.address.domains[1], str(peer.address))
        assert lost.code == "ETIMEDOUT"
        assert "nothing comes back" in str(lost)
        assert "the other NICs carry on" in str(lost)
        write()
        assert peers.count == 0
        assert target.get() == pattern(1, 1 << 18)
