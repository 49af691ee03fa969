"""C9: user code cannot hurt the engine. What a callback raises is reported; what it calls works."""

from __future__ import annotations

import threading

import pytest

from fabric_core import TransferEngine
from fabric_core.conformance.kit import Calls, Engines, Kit, Memory, Pair, eventually, finish, pattern


class Oops(Exception):
    """Raised by the callbacks below."""


def boom(*_args: object) -> None:
    raise Oops("from a callback")


def test_a_raising_on_done_is_reported_and_the_engine_goes_on(engines: Engines, pair: Pair) -> None:
    """C9: for transfers and for expectations."""
    source, target = Memory(pair.a, 64), Memory(pair.b, 64)
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, 1, boom)
    sent = pair.a.submit_single_write(64, imm, (source.handle, 0), (target.desc, 0), boom)
    finish([arrived, sent])  # they ended well; their callbacks did not
    assert isinstance(engines.errors(pair.a).wait()[0], Oops)
    assert isinstance(engines.errors(pair.b).wait()[0], Oops)
    calls = Calls()
    finish(pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), calls) for _ in range(10))
    calls.wait(10)
    assert (sent.state, arrived.state) == ("done", "done")


def test_a_raising_on_message_is_reported_and_its_buffer_is_used_again(engines: Engines, pair: Pair) -> None:
    """C9: a pool of one buffer goes on after its callback raised."""
    calls = Calls()

    def sometimes(message: bytes) -> None:
        calls(message)
        if message != b"fine":
            raise Oops(message)

    pair.b.submit_recvs(64, 1, sometimes)
    finish([pair.a.submit_send(pair.b.address, message) for message in (b"bad", b"fine", b"bad", b"fine")])
    assert sorted(calls.wait(4)) == [b"bad", b"bad", b"fine", b"fine"]
    assert all(isinstance(error, Oops) for error in engines.errors(pair.b).wait(2))


def test_a_raising_added_callback_does_not_stop_the_others(engines: Engines, pair: Pair) -> None:
    """C9: each is called, each error is reported."""
    source, target, calls = Memory(pair.a, 64), Memory(pair.b, 64), Calls()
    transfer = pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), boom)
    transfer.add_done_callback(boom)
    transfer.add_done_callback(calls)
    assert calls.wait() == [transfer]
    assert len(engines.errors(pair.a).wait(2)) == 2


def test_a_callback_that_exits_does_not_end_the_callbacks(engines: Engines, pair: Pair) -> None:
    """C9: SystemExit is an exception of the callback like any other; the callback thread goes on."""
    source, target, calls = Memory(pair.a, 64), Memory(pair.b, 64), Calls()

    def leave(_transfer: object) -> None:
        raise SystemExit("from a callback")

    finish([pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), leave)])
    finish([pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), calls)])
    calls.wait(1)
    assert isinstance(engines.errors(pair.a).wait(1)[0], SystemExit)


def test_a_raising_on_error_is_survived(pair: Pair, recwarn: pytest.WarningsRecorder) -> None:
    """C9: even the last resort may be broken."""
    pair.a.on_error = boom
    source, target, calls = Memory(pair.a, 64), Memory(pair.b, 64), Calls()
    finish([pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), boom)])
    finish([pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), calls)])
    calls.wait()


def test_without_on_error_the_log_has_the_traceback(engine: TransferEngine, caplog: pytest.LogCaptureFixture) -> None:
    """C9: the default is to log."""
    engine.on_error = None
    source, target = Memory(engine, 64), Memory(engine, 64)
    finish([engine.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), boom)])
    eventually(lambda: "from a callback" in caplog.text, "the log names the exception")
    engine.close()
    assert "Oops" in caplog.text


def test_a_callback_may_submit(pair: Pair, kit: Kit) -> None:
    """C9: a chain of writes, each started in the callback of the one before."""
    source, target, finished = Memory(pair.a, 64, pattern(1, 64)), Memory(pair.b, 64), Calls()
    left = kit.scaled(20, 100, 2000)

    def again(_transfer: object) -> None:
        nonlocal left
        left -= 1
        if left:
            pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), again)
        else:
            finished()

    pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), again)
    eventually(lambda: finished.count == 1, "the chain comes to its end")


def test_two_engines_can_play_ping_pong_in_their_callbacks(pair: Pair, kit: Kit) -> None:
    """C9: receiving, sending, expecting and writing from the callback thread."""
    rounds, over = kit.scaled(20, 100, 2000), Calls()

    def back(engine: TransferEngine, to: TransferEngine, message: bytes) -> None:
        turn = int.from_bytes(message, "little")
        if turn == rounds:
            over(turn)
        else:
            engine.submit_send(to.address, (turn + 1).to_bytes(4, "little"))

    pair.a.submit_recvs(64, 2, lambda message: back(pair.a, pair.b, message))
    pair.b.submit_recvs(64, 2, lambda message: back(pair.b, pair.a, message))
    pair.a.submit_send(pair.b.address, (0).to_bytes(4, "little"))
    eventually(lambda: over.count == 1, "the last ball is played", timeout=60)


def test_a_callback_may_wait_for_another_operation(pair: Pair) -> None:
    """C9: waiting on the callback thread makes progress itself."""
    source, target, ends = Memory(pair.a, 64), Memory(pair.b, 64), Calls()

    def wait(_transfer: object) -> None:
        second = pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0))
        second.wait(10)
        ends(second.state)

    pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), wait)
    assert ends.wait() == ["done"]


def test_a_callback_may_register_and_unregister(pair: Pair) -> None:
    """C9: set-up calls work there too."""
    source, target, ends = Memory(pair.a, 64), Memory(pair.b, 64), Calls()

    def work(_transfer: object) -> None:
        fresh = Memory(pair.a, 4096)
        pair.a.dereg_mr(fresh.handle)
        imm = pair.a.alloc_imm()
        ends(pair.a.free_imm(imm))

    pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), work)
    assert ends.wait() == [0]


def test_a_callback_may_close_its_engine(engines: Engines, kit: Kit) -> None:
    """C9, C1: no deadlock; what was in flight still ends once."""
    pair, calls, closed = engines.pair(), Calls(), threading.Event()
    source, target = Memory(pair.a, 64), Memory(pair.b, 64)
    others = [pair.a.submit_send(pair.b.address, b"nobody receives", calls) for _ in range(20)]

    def close(_transfer: object) -> None:
        pair.a.close(5.0)
        closed.set()

    pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), close)
    assert closed.wait(6.0 + kit.slack), "close() inside a callback did not return"
    pair.a.close()
    calls.wait(len(others))
    assert pair.a.closed
    assert sorted(map(id, calls.firsts)) == sorted(map(id, others))


def test_a_slow_callback_does_not_stop_the_transfers(pair: Pair) -> None:
    """C8, C9: the worker goes on while the callback thread is busy."""
    source, target = Memory(pair.a, 64), Memory(pair.b, 64)
    entered, leave = threading.Event(), threading.Event()

    def slow(_transfer: object) -> None:
        entered.set()
        leave.wait(30)

    pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), slow)
    assert entered.wait(20)
    finish(pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0)) for _ in range(50))
    leave.set()
