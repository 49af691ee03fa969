"""Await: transfers and expectations in asyncio, without a busy loop and without a thread per wait (C1, C8)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from fabric_core import DeadlineExceeded, TransferEngine
from fabric_core.conformance.kit import Calls, Engines, Kit, Memory, Pair, finish, pattern


def run(main: Coroutine[Any, Any, None]) -> None:
    """One event loop; what is meant to work has 30 seconds."""

    async def bounded() -> None:
        await asyncio.wait_for(main, 30)

    asyncio.run(bounded())


def test_a_transfer_and_an_expectation_can_be_awaited(pair: Pair) -> None:
    """C1, C10: the payload is there when await returns."""
    source, target = Memory(pair.a, 100_000, pattern(1, 100_000)), Memory(pair.b, 100_000)

    async def main() -> None:
        imm = pair.b.alloc_imm()
        arrived = pair.b.expect_imm_count(imm, 1)
        sent = pair.a.submit_single_write(100_000, imm, (source.handle, 0), (target.desc, 0))
        await arrived
        assert target.get() == pattern(1, 100_000)
        await sent
        assert (sent.state, arrived.state) == ("done", "done")

    run(main())


def test_what_ended_before_can_be_awaited_again_and_again(pair: Pair) -> None:
    """C1: an end is an end."""
    source, target = Memory(pair.a, 64), Memory(pair.b, 64)

    async def main() -> None:
        sent = pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0))
        for _ in range(3):
            await sent

    run(main())
    sent = pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0))
    finish([sent])

    async def later() -> None:
        await sent

    run(later())


def test_a_hundred_are_gathered(wide: Pair) -> None:
    """C1: all of them, in one loop."""
    source, target = Memory(wide.a, 100 * 1000, pattern(2, 100_000)), Memory(wide.b, 100 * 1000)

    async def main() -> None:
        imms = [wide.b.alloc_imm() for _ in range(100)]
        arrived = [wide.b.expect_imm_count(imm, 1) for imm in imms]
        sent = [
            wide.a.submit_single_write(1000, imm, (source.handle, k * 1000), (target.desc, k * 1000))
            for k, imm in enumerate(imms)
        ]
        await asyncio.gather(*map(wait, arrived), *map(wait, sent))

    run(main())
    assert target.get() == source.get()


async def wait(operation: Any) -> None:
    await operation


def test_several_tasks_may_await_one_operation(pair: Pair) -> None:
    """C1: each of them is woken."""
    target = Memory(pair.b, 64)

    async def main() -> None:
        imm = pair.b.alloc_imm()
        arrived = pair.b.expect_imm_count(imm, 1)
        tasks = [asyncio.create_task(wait(arrived)) for _ in range(10)]
        await asyncio.sleep(0)
        pair.a.submit_barrier(None, None, imm, [target.desc])
        await asyncio.gather(*tasks)

    run(main())


def test_an_error_is_raised_where_it_is_awaited(pair: Pair) -> None:
    """C1: the operation's own error, at its deadline."""

    async def main() -> None:
        with pytest.raises(DeadlineExceeded):
            await pair.a.submit_send(pair.b.address, b"nobody receives", timeout=0.2)

    run(main())


def test_cancelling_the_task_leaves_the_operation_alone(pair: Pair) -> None:
    """C1: a task that is cancelled stops waiting; the loop and the operation go on, and can be awaited anew."""
    target = Memory(pair.b, 64)

    async def main() -> None:
        imm, calls = pair.b.alloc_imm(), Calls()
        arrived = pair.b.expect_imm_count(imm, 1, calls)
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(wait(arrived), 0.02)
        task = asyncio.create_task(wait(arrived))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        pair.a.submit_barrier(None, None, imm, [target.desc])
        if arrived.state == "cancelled":
            pytest.fail("cancelling a task cancelled the operation that others may wait for")
        await arrived
        calls.wait()

    run(main())


def test_a_loop_that_ended_before_the_operation_is_no_problem(engines: Engines, pair: Pair) -> None:
    """C9: the waiter is gone, its event loop is closed; the engine does not mind."""
    target = Memory(pair.b, 64)
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, 1)

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(arrived), 0.02)

    run(main())
    finish([pair.a.submit_barrier(None, None, imm, [target.desc]), arrived])
    pair.b.close()
    assert engines.errors(pair.b).count == 0


def test_the_loop_turns_while_it_waits(pair: Pair) -> None:
    """C8: awaiting does not block the loop."""

    async def main() -> None:
        turns = 0
        task = asyncio.create_task(wait(pair.b.expect_imm_count(pair.b.alloc_imm(), 1, timeout=0.3)))
        while not task.done():
            await asyncio.sleep(0.005)
            turns += 1
        with pytest.raises(DeadlineExceeded):
            await task
        assert turns >= 5

    run(main())


@pytest.mark.parametrize("how", ["await", "wait", "idle"])
def test_waiting_costs_no_processor_time(engines: Engines, kit: Kit, how: str) -> None:
    """C8: an adaptive engine sleeps when nothing happens, and so does whoever waits for it."""
    engine = engines.open(polling="adaptive")
    memory, span = Memory(engine, 64), 1.0
    finish([engine.submit_single_write(64, None, (memory.handle, 0), (memory.desc, 0))])
    expectation = engine.expect_imm_count(engine.alloc_imm(), 1, timeout=span)

    async def main() -> None:
        await expectation

    spent, begin = time.process_time(), time.monotonic()
    if how == "idle":
        time.sleep(span)  # not to synchronise: this is what is measured
    else:
        with pytest.raises(DeadlineExceeded):
            run(main()) if how == "await" else expectation.wait(span + 5)
    spent, took = time.process_time() - spent, time.monotonic() - begin
    assert spent <= 0.25 * took, f"{spent:.2f} s of processor time in {took:.2f} s of waiting"


def test_messages_can_feed_a_queue_of_the_loop(pair: Pair, kit: Kit) -> None:
    """C9: the usual bridge from the callback thread into asyncio."""
    count = kit.scaled(20, 100, 1000)

    async def main() -> None:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[bytes]()
        pair.b.submit_recvs(64, 4, lambda message: loop.call_soon_threadsafe(queue.put_nowait, message))
        await asyncio.gather(*(wait(pair.a.submit_send(pair.b.address, bytes([k & 255]))) for k in range(count)))
        got = [await queue.get() for _ in range(count)]
        assert sorted(got) == sorted(bytes([k & 255]) for k in range(count))

    run(main())


def test_an_engine_may_be_closed_under_a_waiting_task(engine: TransferEngine) -> None:
    """C1: the task is woken with the operation's end."""

    async def main() -> None:
        task = asyncio.create_task(wait(engine.expect_imm_count(engine.alloc_imm(), 1)))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.close)
        with pytest.raises(Exception, match=r"."):
            await task

    run(main())
