"""C8: nothing blocks the worker and nothing blocks under the GIL; a slow or dead peer does not delay another."""

from __future__ import annotations

import threading
import time

import pytest

from fabric_core import FabricError, NetAddr, QueueFull, Transfer
from fabric_core.conformance.kit import Calls, Engines, Kit, Memory, Pair, finish, pattern, settle
from fabric_core.conformance.remote import Remotes


def test_a_full_engine_refuses_after_its_submit_timeout(engines: Engines, kit: Kit) -> None:
    """C8: backpressure is a wait with an end, then QueueFull; what was taken before is not hurt."""
    pair = engines.pair(max_inflight=16, submit_timeout=0.3)
    taken: list[Transfer] = []
    begins: list[float] = []

    def flood() -> None:
        for _ in range(10_000):
            begins.append(time.monotonic())
            taken.append(pair.a.submit_send(pair.b.address, b"nobody receives yet"))

    with pytest.raises(QueueFull):
        flood()
    assert 0.2 <= time.monotonic() - begins[-1] <= 0.3 + kit.slack
    assert len(taken) >= 16
    calls = Calls()
    pair.b.submit_recvs(64, 4, calls)
    finish(taken)
    calls.wait(len(taken))
    finish([pair.a.submit_send(pair.b.address, b"and now there is room again")])


def test_a_submit_that_waits_for_room_lets_other_threads_run(engines: Engines) -> None:
    """C8: the wait is outside the GIL."""
    pair = engines.pair(max_inflight=8, submit_timeout=1.0)
    refused, turns = threading.Event(), 0

    def flood() -> None:
        try:
            for _ in range(10_000):
                pair.a.submit_send(pair.b.address, b"nobody receives")
        except QueueFull:
            refused.set()

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    while not refused.wait(0.001):
        turns += 1
    thread.join(10)
    assert turns > 50, "this thread stood still while another one waited for room"


def test_a_peer_that_receives_nothing_does_not_delay_another(engines: Engines, kit: Kit) -> None:
    """C8: no head-of-line blocking across peers."""
    a, deaf, good = engines.open(), engines.open(), engines.open()
    calls, count = Calls(), kit.scaled(50, 300, 3000)
    good.submit_recvs(64, 8, calls)
    stuck = [a.submit_send(deaf.address, b"nobody receives", timeout=60) for _ in range(2000)]
    source, target = Memory(a, 4096, pattern(1, 4096)), Memory(good, 4096)
    begin = time.monotonic()
    for k in range(count):
        sends = [a.submit_send(good.address, bytes([k & 255]))]
        sends.append(a.submit_single_write(4096, None, (source.handle, 0), (target.desc, 0)))
        finish(sends)
    assert time.monotonic() - begin < 20
    assert not any(one.done for one in stuck)
    calls.wait(count)
    a.close()
    assert all(one.done for one in stuck)


def test_a_peer_that_receives_nothing_can_still_be_written_to(pair: Pair) -> None:
    """C8: messages that wait for a buffer do not hold up writes to the same peer."""
    stuck = [pair.a.submit_send(pair.b.address, b"nobody receives", timeout=60) for _ in range(100)]
    source, target = Memory(pair.a, 4096, pattern(2, 4096)), Memory(pair.b, 4096)
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, 20)
    finish([pair.a.submit_single_write(4096, imm, (source.handle, 0), (target.desc, 0)) for _ in range(20)])
    finish([arrived])
    assert not any(one.done for one in stuck)


def test_a_peer_that_stands_still_does_not_delay_another(engines: Engines, remotes: Remotes, kit: Kit) -> None:
    """C8, C11: one process is stopped, the other is served as before."""
    engine, still, good = engines.open(), remotes.start(), remotes.start()
    source = Memory(engine, 1 << 20, pattern(3, 1 << 20))
    stuck_at, target = still.memory(1 << 20), good.memory(1 << 20)
    finish([engine.submit_single_write(1, None, (source.handle, 0), (stuck_at.desc, 0))])
    still.stop()
    nowhere = (stuck_at.desc, 0)
    stuck = [engine.submit_single_write(1 << 20, None, (source.handle, 0), nowhere, timeout=5) for _ in range(50)]
    stuck += [engine.submit_send(still.address, b"x", timeout=5) for _ in range(50)]
    imm, rounds = good.alloc_imm(), kit.scaled(5, 20, 200)
    begin = time.monotonic()
    for _ in range(rounds):
        arrived = good.expect(imm, 1)
        finish([engine.submit_single_write(1 << 20, imm, (source.handle, 0), (target.desc, 0))])
        good.ends_well(arrived)
    assert time.monotonic() - begin < 20
    assert target.holds(pattern(3, 1 << 20))
    still.cont()
    settle(stuck)


def test_a_peer_that_is_killed_does_not_disturb_another(engines: Engines, remotes: Remotes) -> None:
    """C8, C11: every write to the survivor is done."""
    engine, doomed, good = engines.open(), remotes.start(), remotes.start()
    source = Memory(engine, 1 << 20, pattern(4, 1 << 20))
    lost, target = doomed.memory(1 << 20), good.memory(1 << 20)
    imm = good.alloc_imm()
    arrived = good.expect(imm, 40)
    hopeless, fine = [], []
    for k in range(40):
        hopeless.append(engine.submit_single_write(1 << 20, None, (source.handle, 0), (lost.desc, 0)))
        fine.append(engine.submit_single_write(1 << 20, imm, (source.handle, 0), (target.desc, 0)))
        if k == 20:
            doomed.kill()
    finish(fine)
    good.ends_well(arrived)
    settle(hopeless)
    assert target.holds(pattern(4, 1 << 20))


def test_nobody_answers_at_an_unknown_address_and_the_rest_goes_on(engines: Engines, free_name: str, kit: Kit) -> None:
    """C8: a connection attempt that fails is bounded, and does not hold up anyone."""
    engine, good = engines.open(connect_timeout=1.0), engines.open()
    calls = Calls()
    good.submit_recvs(64, 4, calls)
    nowhere = engine.submit_send(NetAddr.parse(f"{kit.backend}:{free_name}"), b"hello?")
    finish([engine.submit_send(good.address, b"hello")], timeout=10)
    assert calls.wait() == [b"hello"]
    with pytest.raises(FabricError):
        nowhere.wait(10)
