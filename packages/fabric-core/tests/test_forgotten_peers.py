"""An engine that meets many short-lived peers does not grow for ever (R9, S8), and never mixes one up with another."""

from __future__ import annotations

import pytest

from fabric_core import FabricError, PeerLost, TransferEngine
from fabric_core.native_lib import ffi, lib

MANY = 1500


def known(engine: TransferEngine) -> int:
    return len(engine._names)


def test_peers_that_are_lost_are_forgotten_in_time() -> None:
    with TransferEngine.open("cpu", "local", connect_timeout=5.0) as engine:
        first = "local:nobody-0"
        for number in range(MANY):
            transfer = engine.submit_send(f"local:nobody-{number}", b"?")
            with pytest.raises(PeerLost) as caught:
                transfer.wait(5)
            assert caught.value.peer == f"local:nobody-{number}"
        assert known(engine) <= 600 < MANY
        assert len(engine._peers) <= known(engine)
        assert len(engine._slots) == known(engine)
        # the one that was forgotten first can be met again
        with pytest.raises(PeerLost):
            engine.submit_send(first, b"?").wait(5)


def test_a_peer_in_use_is_never_forgotten() -> None:
    with (
        TransferEngine.open("cpu", "local") as engine,
        TransferEngine.open("cpu", "local") as friend,
    ):
        got: list[bytes] = []
        friend.submit_recvs(64, 4, got.append)
        engine.submit_send(friend.address, b"hello").wait(5)
        memory = friend.empty(64)
        _handle, desc = friend.reg_mr(memory)
        mine, _ = engine.reg_mr(engine.empty(64))
        imm = engine.alloc_imm()
        waiting = engine.expect_imm_count(imm, 1, timeout=60, peers=["local:nobody-kept"])
        with pytest.raises(PeerLost):  # it stays the name in an error that may be asked for later
            waiting.wait(5)
        for number in range(MANY):
            with pytest.raises(PeerLost):
                engine.submit_send(f"local:nobody-{number}", b"?").wait(5)
        engine.submit_single_write(64, None, (mine, 0), (desc, 0), None).wait(5)
        engine.submit_send(friend.address, b"again").wait(5)
        error = waiting.exception()
        assert isinstance(error, PeerLost)
        assert error.peer == "local:nobody-kept"


def test_a_number_kept_too_long_names_nobody() -> None:
    with TransferEngine.open("cpu", "local") as engine:
        with pytest.raises(FabricError):
            engine.submit_send("local:nobody-first", b"?").wait(5)
        number = next(n for (_, n), addr in engine._names.items() if "first" in str(addr))
        stats = ffi.new("fab_peer_stats *")
        assert lib.fab_engine_peer_stats(engine._core.pointer, 0, number, stats) == 0
        for other in range(MANY):
            with pytest.raises(FabricError):
                engine.submit_send(f"local:nobody-{other}", b"?").wait(5)
        assert lib.fab_engine_peer_stats(engine._core.pointer, 0, number, stats) < 0
