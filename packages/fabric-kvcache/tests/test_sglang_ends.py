"""Writes of SGLang's threads that cannot be: each call ends, with a number, whatever becomes of the peer."""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fabric_core import EngineClosed, PeerLost, TransferEngine, Unsupported
from fabric_kvcache import lmcache, sglang
from fabric_kvcache.patience import patient
from fabric_kvcache.sglang.sessions import Sessions

LIMIT = 60.0  # seconds: the longest that anything may take which is meant to work


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    made = Sessions(TransferEngine.open(), timeout=LIMIT)
    made.memory = np.zeros(64, np.uint8)  # type: ignore[attr-defined]
    made.batch_register([made.memory.ctypes.data], [64])  # type: ignore[attr-defined]
    yield made
    made.close()


class Deaf:
    """A peer that takes messages and answers none."""

    def __init__(self) -> None:
        self.engine = TransferEngine.open()
        self.heard: queue.Queue[bytes] = queue.Queue()
        self.engine.submit_recvs(1 << 16, 4, self.heard.put)
        self.name = f"{self.engine.address}:1"


@pytest.fixture
def deaf() -> Iterator[Deaf]:
    made = Deaf()
    yield made
    made.engine.close()


def test_a_peer_that_dies_with_the_question_ends_it_at_once(sessions: Sessions, deaf: Deaf) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(sessions.write, deaf.name, [sessions.memory.ctypes.data], [4096], [8])  # type: ignore[attr-defined]
        deaf.heard.get(timeout=LIMIT)
        deaf.engine.close()
        error = asked.exception(LIMIT)
    assert isinstance(error, PeerLost)
    assert error.code != "ETIMEDOUT", error  # not by its deadline
    assert not sessions._peers._watches


def test_close_ends_questions(sessions: Sessions, deaf: Deaf) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(sessions.write, deaf.name, [sessions.memory.ctypes.data], [4096], [8])  # type: ignore[attr-defined]
        deaf.heard.get(timeout=LIMIT)
        sessions.close()
        assert isinstance(asked.exception(LIMIT), EngineClosed)
    assert sessions.transfer_sync(deaf.name, 8, 8, 8) == -1
    assert sessions.send_probe(deaf.name) == -1


@pytest.mark.parametrize("blocks", [([1 << 63], [8], [8]), ([8], [1 << 64], [8]), ([None], [8], [8]), (8, 8, 8)])
def test_nothing_is_raised_into_sglangs_threads(
    sessions: Sessions, blocks: tuple[list[int], list[int], list[int]]
) -> None:
    """An address may be what a peer made of it; an error would end the thread that serves all other peers."""
    assert sessions.batch_transfer_sync("local:nobody:1", *blocks) == -1


def test_peers_that_come_and_go_leave_nothing_behind() -> None:
    """One immediate is held for each peer that lives, and given back."""
    ours = Sessions(TransferEngine.open(imm_slots=256), timeout=LIMIT)
    memory = np.zeros(64, np.uint8)
    ours.batch_register([memory.ctypes.data], [64])
    try:
        for _ in range(300):
            theirs = Sessions(TransferEngine.open(), timeout=LIMIT)
            assert ours.send_probe(theirs.get_session_id()) == 0
            theirs.close()
        assert len(ours._peers._tables) < 256
    finally:
        ours.close()


@pytest.mark.parametrize(("adapter", "engine"), [(sglang, "sglang"), (lmcache, "lmcache")])
def test_versions_that_are_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch, adapter: object, engine: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == engine]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(Unsupported, match=r"0\.5\.\d+ was tried"):
        adapter.register()  # type: ignore[attr-defined]


def test_a_peer_may_stand_still_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang never asks a decoder again that was taken for lost once."""
    assert (patient().heartbeat, patient().connect_timeout) == (5.0, 10.0)
    assert patient(backend="local", heartbeat=3.0).heartbeat == 3.0
    monkeypatch.setenv("FABRIC_HEARTBEAT", "0.5")
    assert (patient().heartbeat, patient().connect_timeout) == (0.5, 10.0)
