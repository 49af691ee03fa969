"""C1: every operation ends exactly once: done, failed with a reason, or cancelled. Nothing is dropped or fires twice.

A second call of a callback would come before close() returns, because close() ends the callback thread. So each test
closes the engine first and counts then.
"""

from __future__ import annotations

import ctypes
import signal
import time
from collections.abc import Callable

import pytest

from fabric_core import (
    Cancelled,
    DeadlineExceeded,
    EngineClosed,
    FabricError,
    Flag,
    PeerLost,
    TransferEngine,
    WaitTimeout,
)
from fabric_core.conformance.kit import (
    Calls,
    Engines,
    Kit,
    Memory,
    Pair,
    eventually,
    fails,
    finish,
    names,
    pattern,
    settle,
)
from fabric_core.conformance.remote import Remote, Remotes
from fabric_core.operations import Operation

STATES = {"done", "failed", "cancelled"}


def test_each_callback_is_called_once_with_its_own_operation(wide: Pair, kit: Kit) -> None:
    """C1: transfers and expectations."""
    count = kit.scaled(50, 200, 5000)
    source, target, calls = Memory(wide.a, 64), Memory(wide.b, 64), Calls()
    imm = wide.b.alloc_imm()
    operations: list[Operation] = [wide.b.expect_imm_count(imm, 1, calls) for _ in range(count)]
    operations += [
        wide.a.submit_single_write(64, imm, (source.handle, 0), (target.desc, 0), calls) for _ in range(count)
    ]
    finish(operations)
    calls.wait(2 * count)
    wide.a.close()
    wide.b.close()
    assert sorted(map(id, calls.firsts)) == sorted(map(id, operations))


def test_a_flag_counts_ends_and_bad_ends(pair: Pair) -> None:
    """C1: the low half of a flag counts what ended, the high half what ended badly; native code reads the same word."""
    source, target, flag = Memory(pair.a, 64), Memory(pair.b, 64), Flag()
    word = ctypes.c_uint64.from_address(flag.ptr)
    good = [pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), flag) for _ in range(20)]
    finish(good)
    eventually(lambda: flag.value == 20, "the flag counts 20 ends")
    assert (word.value, flag.done, flag.failed) == (20, 20, 0)
    bad = pair.a.submit_send(pair.b.address, b"nobody receives", flag, timeout=0.2)
    fails(bad, DeadlineExceeded, within=10)
    eventually(lambda: flag.value == (1 << 32) + 21, "the flag counts one bad end")
    pair.a.close()
    assert (word.value, flag.done, flag.failed) == ((1 << 32) + 21, 21, 1)


def test_a_callback_added_after_the_end_runs_once(pair: Pair) -> None:
    """C1: add_done_callback is never too late, and never doubles."""
    source, target, early, late = Memory(pair.a, 64), Memory(pair.b, 64), Calls(), Calls()
    transfer = pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0))
    transfer.add_done_callback(early)
    finish([transfer])
    transfer.add_done_callback(late)
    assert (early.wait(), late.wait()) == ([transfer], [transfer])
    pair.a.close()
    assert (early.count, late.count) == (1, 1)


def test_an_operation_may_have_several_callbacks(pair: Pair) -> None:
    """C1: on_done and any number of added ones, each once, for a failure too."""
    calls = [Calls() for _ in range(4)]
    transfer = pair.a.submit_send(pair.b.address, b"nobody receives", calls[0], timeout=0.2)
    for added in calls[1:]:
        transfer.add_done_callback(added)
    fails(transfer, DeadlineExceeded, within=10)
    for one in calls:
        assert one.wait() == [transfer]
    pair.a.close()
    assert [one.count for one in calls] == [1] * 4


def test_wait_may_give_up_and_the_operation_goes_on(pair: Pair) -> None:
    """C1: WaitTimeout is about the waiting, not about the operation."""
    imm = pair.b.alloc_imm()
    expectation = pair.b.expect_imm_count(imm, 1)
    for _ in range(3):
        with pytest.raises(WaitTimeout):
            expectation.wait(0.02)
    with pytest.raises(WaitTimeout):
        expectation.wait(0)
    assert (expectation.state, expectation.done, expectation.exception()) == ("pending", False, None)
    target = Memory(pair.b, 64)
    finish([pair.a.submit_barrier(None, None, imm, [target.desc]), expectation])


@pytest.mark.parametrize("how", ["send", "expectation"])
def test_a_deadline_ends_what_never_comes(pair: Pair, kit: Kit, how: str) -> None:
    """C1, C3: no wait without an end; the error comes at the deadline, not much before and not much after."""
    calls, begin = Calls(), time.monotonic()
    operation: Operation
    if how == "send":
        operation = pair.a.submit_send(pair.b.address, b"nobody receives", calls, timeout=0.5)
    else:
        operation = pair.a.expect_imm_count(pair.a.alloc_imm(), 1, calls, timeout=0.5)
    error = fails(operation, DeadlineExceeded, within=0.6 + kit.slack)
    assert 0.45 <= time.monotonic() - begin <= 0.6 + kit.slack
    assert error.code == "ETIME"
    calls.wait()
    pair.a.close()
    assert calls.count == 1


def test_a_deadline_needs_nobody_who_waits(pair: Pair, kit: Kit) -> None:
    """C1: the callback fires although no thread is in wait()."""
    calls, begin = Calls(), time.monotonic()
    pair.a.submit_send(pair.b.address, b"nobody receives", calls, timeout=0.3)
    calls.wait(timeout=0.4 + kit.slack)
    assert time.monotonic() - begin >= 0.25


def test_the_default_timeout_comes_from_the_settings(engines: Engines, kit: Kit) -> None:
    """C1: timeout=None is settings.timeout; nothing waits for ever."""
    pair = engines.pair(timeout=0.4)
    operations: list[Operation] = [
        pair.a.submit_send(pair.b.address, b""),
        pair.a.expect_imm_count(pair.a.alloc_imm(), 1),
    ]
    for operation in operations:
        fails(operation, DeadlineExceeded, within=0.5 + kit.slack)


def test_a_signal_gets_through_while_a_thread_waits(pair: Pair, kit: Kit) -> None:
    """C1: Ctrl-C during wait() works; the operation goes on."""

    class Interrupted(Exception):
        """What the handler raises."""

    def interrupt(_number: int, _frame: object) -> None:
        raise Interrupted

    expectation = pair.a.expect_imm_count(pair.a.alloc_imm(), 1)
    before = signal.signal(signal.SIGALRM, interrupt)
    begin = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupted):
            expectation.wait(10)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begin <= 0.3 + kit.slack
    assert expectation.state == "pending"


def test_cancel_ends_a_send_that_nobody_receives(pair: Pair) -> None:
    """C1: cancelled is a state of its own."""
    calls = Calls()
    transfer = pair.a.submit_send(pair.b.address, b"nobody receives", calls)
    transfer.cancel()
    fails(transfer, Cancelled, within=10)
    transfer.cancel()  # too late, and harmless
    assert calls.wait() == [transfer]
    pair.a.close()
    assert calls.count == 1


def test_cancel_ends_an_expectation_and_its_immediates_stay(pair: Pair) -> None:
    """C1, C3: what had arrived is there for the next one."""
    imm, target, calls = pair.b.alloc_imm(), Memory(pair.b, 64), Calls()
    expectation = pair.b.expect_imm_count(imm, 2, calls)
    finish([pair.a.submit_barrier(None, None, imm, [target.desc])])
    eventually(lambda: pair.b.imm_count(imm) == 1, "one immediate arrives")
    expectation.cancel()
    fails(expectation, Cancelled, within=10)
    finish([pair.b.expect_imm_count(imm, 1)])
    calls.wait()
    pair.b.close()
    assert calls.count == 1


def test_cancel_after_the_end_changes_nothing(pair: Pair) -> None:
    """C1: the first end stays."""
    source, target, calls = Memory(pair.a, 64), Memory(pair.b, 64), Calls()
    transfer = pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), calls)
    finish([transfer])
    transfer.cancel()
    assert (transfer.state, transfer.exception()) == ("done", None)
    pair.a.close()
    assert calls.count == 1


def test_cancel_races_with_completion_and_one_of_them_wins(pair: Pair, kit: Kit) -> None:
    """C1: whoever wins, there is one end; the error agrees with the state."""
    count = kit.scaled(50, 300, 5000)
    source, target, calls = Memory(pair.a, 65_536), Memory(pair.b, 65_536), Calls()
    transfers = []
    for _ in range(count):
        transfers.append(pair.a.submit_single_write(65_536, None, (source.handle, 0), (target.desc, 0), calls))
        transfers[-1].cancel()
    states = settle(transfers)
    assert set(states) <= {"done", "cancelled"}
    assert [transfer.exception() is None for transfer in transfers] == [state == "done" for state in states]
    calls.wait(count)
    pair.a.close()
    assert sorted(map(id, calls.firsts)) == sorted(map(id, transfers))


def test_close_ends_everything_in_flight_once(engines: Engines, nics: int, kit: Kit) -> None:
    """C1: writes, sends, expectations; with and without callbacks; the flag counts all of them."""
    pair, flag, calls = engines.pair(nics, nics), Flag(), Calls()
    source, target = Memory(pair.a, 1 << 20, pattern(1, 1 << 20)), Memory(pair.b, 1 << 20)
    imm, count = pair.a.alloc_imm(), kit.scaled(20, 100, 1000)
    operations: list[Operation] = []
    for done in (flag, calls, None):
        for _ in range(count):
            operations += [
                pair.a.submit_single_write(100_000, None, (source.handle, 0), (target.desc, 0), done),
                pair.a.submit_send(pair.b.address, b"nobody receives", done),
                pair.a.submit_barrier(None, done, 0, [target.desc]),
            ]
    expected: list[Operation] = [pair.a.expect_imm_count(imm, 1, calls) for _ in range(count)]
    begin = time.monotonic()
    pair.a.close(5.0)
    assert time.monotonic() - begin <= 5.0 + kit.slack
    assert pair.a.closed
    states = [operation.state for operation in operations]
    assert set(states) <= STATES
    assert all(operation.done for operation in operations + expected)
    assert "cancelled" in states
    assert {one.state for one in expected} == {"cancelled"}
    assert sorted(map(id, calls.firsts)) == sorted(map(id, operations[3 * count : 6 * count] + expected))
    bad = sum(state != "done" for state in states[: 3 * count])
    assert (flag.done, flag.failed) == (3 * count, bad)


def test_close_twice_is_close_once(engine: TransferEngine) -> None:
    """C1: idempotent, also as a context manager that was closed inside."""
    with engine:
        engine.close()
        engine.close()
    assert engine.closed


def test_a_closed_engine_refuses_everything_at_once(pair: Pair) -> None:
    """C1: with EngineClosed, never a crash and never a hang."""
    source, target = Memory(pair.a, 64), Memory(pair.b, 64)
    imm = pair.a.alloc_imm()
    pair.a.close()
    attempts: list[Callable[[], object]] = [
        lambda: pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0)),
        lambda: pair.a.submit_send(pair.b.address, b"x"),
        lambda: pair.a.submit_recvs(64, 1, print),
        lambda: pair.a.submit_barrier(None, None, imm, [target.desc]),
        lambda: pair.a.expect_imm_count(imm, 1),
        pair.a.alloc_imm,
        lambda: pair.a.reg_mr(bytearray(64)),
        lambda: pair.a.add_peer_group([pair.b.address]),
        lambda: pair.a.alloc_uvm_watcher(print),
    ]
    for attempt in attempts:
        with pytest.raises(EngineClosed):
            attempt()


def test_whoever_waits_while_the_engine_is_closed_is_released(pair: Pair) -> None:
    """C1: with the operation's own end."""
    import threading

    expectation = pair.a.expect_imm_count(pair.a.alloc_imm(), 1)
    ends = Calls()

    def wait() -> None:
        try:
            expectation.wait(20)
        except FabricError as error:
            ends(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    with pytest.raises(WaitTimeout):
        expectation.wait(0.05)  # long enough that the thread waits too, most times; either order must work
    pair.a.close()
    assert isinstance(ends.wait()[0], Cancelled)
    waiter.join(10)
    assert not waiter.is_alive()


def test_close_while_a_peer_stands_still_ends_in_time(engines: Engines, remote: Remote, kit: Kit) -> None:
    """C1, C8: close(timeout) does not wait for a peer that does not answer."""
    engine, target = engines.open(), remote.memory(1 << 20)
    source = Memory(engine, 1 << 20)
    finish([engine.submit_single_write(64, None, (source.handle, 0), (target.desc, 0))])
    remote.stop()
    operations = [
        engine.submit_single_write(1 << 20, None, (source.handle, 0), (target.desc, 0)) for _ in range(16)
    ] + [engine.submit_send(remote.address, b"x") for _ in range(16)]
    begin = time.monotonic()
    engine.close(1.0)
    assert time.monotonic() - begin <= 1.0 + kit.slack
    assert {operation.state for operation in operations} <= STATES
    remote.cont()


def test_the_ends_of_a_dead_peers_operations_come_once(engines: Engines, remotes: Remotes, nics: int) -> None:
    """C1, C11: one end for each of many operations in flight when their peer is killed, and it says why."""
    engine, remote, calls = engines.open(nics=nics), remotes.start(nics=nics), Calls()
    target, source = remote.memory(1 << 20), Memory(engine, 1 << 20)
    operations = [engine.submit_send(remote.address, b"nobody receives", calls) for _ in range(50)]
    operations += [
        engine.submit_single_write(1 << 20, None, (source.handle, 0), (target.desc, 0), calls) for _ in range(50)
    ]
    remote.kill()
    states = settle(operations)
    assert states[:50] == ["failed"] * 50
    for operation in operations:
        error = operation.exception()
        assert operation.state == "done" or (isinstance(error, PeerLost) and names(error, remote.address)), error
    calls.wait(100)
    engine.close()
    assert sorted(map(id, calls.firsts)) == sorted(map(id, operations))
