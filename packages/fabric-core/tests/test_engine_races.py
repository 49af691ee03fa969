"""What an attacker of the engine found once: each of these lost, leaked, crashed or lied."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fabric_core import (
    BadRange,
    ConfigError,
    EngineClosed,
    MrDesc,
    StaleHandle,
    TransferEngine,
    WaitTimeout,
    registry,
)
from fabric_core.domain import Completion, CompletionKind, Domain, DomainCaps, Memory, MrKeys


class Stuck(Domain):
    """Takes one request, never ends it, and is full from then on; a closed link lets go."""

    cancelled = threading.Event()

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.out: list[Completion] = []

    def caps(self) -> DomainCaps:
        return DomainCaps()

    def address(self) -> str:
        return "stuck"

    def mr_reg(self, memory: Memory) -> MrKeys:
        return MrKeys(1, 1, memory.addr)

    def mr_dereg(self, local_key: int) -> None: ...

    def peer_open(self, addr: str) -> int:
        self.out.append(Completion(CompletionKind.PEER_UP, peer=0))
        return 0

    def peer_close(self, peer: int) -> None:
        self.out += [Completion(CompletionKind.OP, id=id, status=-125) for id in self.taken]
        self.taken.clear()

    def post(self, peer: int, writes: Any) -> int:
        if self.taken:
            return 0
        self.taken.append(writes[0].id)
        return 1

    def post_recv(self, id: int, addr: int, length: int) -> bool:
        return False

    def poll(self, max: int, now_ns: int) -> list[Completion]:
        found, self.out = self.out[:max], self.out[max:]
        return found

    def cancel(self, id: int) -> None:
        self.cancelled.set()

    def close(self) -> None: ...


class StuckBackend:
    name = "stuck"
    api_version = 1

    def probe(self) -> list[Any]:
        return []

    def open_group(self, config: Any) -> list[Domain]:
        return [Stuck()]


def test_c8_a_deadline_that_ends_other_transfers_may_take_their_timers_along() -> None:
    registry.register("stuck", StuckBackend(), replace=True)
    with TransferEngine.open(backend="stuck") as engine:
        handle, desc = engine.reg_mr(bytearray(64))
        first = engine.submit_single_write(8, None, (handle, 0), (desc, 0), timeout=0.1)
        assert Stuck.cancelled.wait(10)  # a second later its link is cut, in the midst of these deadlines:
        others = [
            engine.submit_single_write(8, None, (handle, 0), (desc, 0), timeout=0.9 + i * 0.0005) for i in range(1500)
        ]
        for transfer in (first, *others):
            with pytest.raises((TimeoutError, ConnectionError)):
                transfer.wait(10)
    registry.unregister("stuck")


def in_threads(count: int, function: Callable[[], object]) -> list[BaseException]:
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run() -> None:
        barrier.wait()
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return errors


def test_c6_threads_may_share_a_fresh_descriptor_also_of_two_engines() -> None:
    with TransferEngine.open() as a, TransferEngine.open() as b, TransferEngine.open() as peer:
        _, desc = peer.reg_mr(bytearray(64))
        blob = desc.to_bytes()
        sources = [(engine, engine.reg_mr(bytearray(64))[0]) for engine in (a, b)]
        for _ in range(30):
            fresh = MrDesc.from_bytes(blob)

            def write(fresh: MrDesc = fresh) -> None:
                for engine, handle in sources:
                    engine.submit_single_write(8, None, (handle, 0), (fresh, 0)).wait(5)

            assert in_threads(4, write) == []


def test_c1_a_callback_added_after_close_is_called() -> None:
    engine = TransferEngine.open()
    handle, desc = engine.reg_mr(bytearray(64))
    transfer = engine.submit_single_write(8, None, (handle, 0), (desc, 0))
    transfer.wait(5)
    engine.close()
    called: list[object] = []
    transfer.add_done_callback(called.append)
    assert called == [transfer]


def test_c1_no_callback_is_lost_when_close_meets_submits() -> None:
    for _ in range(10):
        engine = TransferEngine.open()
        handle, desc = engine.reg_mr(bytearray(64))
        submitted, called = [0] * 4, []
        numbers = iter(range(4))

        def submit(engine: Any = engine, handle: Any = handle, desc: Any = desc, submitted: Any = submitted,
                   called: Any = called, numbers: Any = numbers) -> None:  # fmt: skip
            me = next(numbers)
            try:
                while True:
                    engine.submit_single_write(8, None, (handle, 0), (desc, 0), called.append)
                    submitted[me] += 1
            except (EngineClosed, StaleHandle):
                pass

        closer = threading.Timer(0.02, engine.close)
        closer.start()
        assert in_threads(4, submit) == []
        closer.join(10)
        end = time.monotonic() + 10
        while len(called) < sum(submitted) and time.monotonic() < end:
            time.sleep(0.001)
        assert len(called) == sum(submitted)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_c12_whatever_the_child_of_a_fork_does_is_an_error_and_no_crash() -> None:
    with TransferEngine.open() as engine:
        handle, desc = engine.reg_mr(bytearray(64))
        pool = engine.submit_recvs(64, 4, print)
        watcher = engine.alloc_uvm_watcher(print)
        transfer = engine.submit_single_write(8, None, (handle, 0), (desc, 0))
        transfer.wait(5)
        imm = engine.alloc_imm()
        doings: list[Callable[[], object]] = [
            pool.close, watcher.close, handle.close, engine.stats, engine.progress, engine.alloc_imm,
            lambda: engine.free_imm(imm), lambda: engine.imm_count(imm), lambda: engine.empty(10),
            lambda: engine.expect_imm_count(imm, 1), lambda: transfer.wait(1), transfer.exception, transfer.cancel,
            lambda: transfer.add_done_callback(print), lambda: transfer.done, lambda: repr(transfer), engine.close,
        ]  # fmt: skip
        for doing in doings:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    doing()
                    code = 0
                except Exception as error:
                    code = 0 if isinstance(error, EngineClosed | StaleHandle) else 2
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, doing


def test_c7_a_handle_closed_by_two_threads_is_closed_once() -> None:
    with TransferEngine.open(local_path="bounce") as engine:
        handle, _ = engine.reg_mr(bytearray(64))
        errors = in_threads(4, lambda: engine.dereg_mr(handle))
        assert len(errors) == 3
        assert {type(error) for error in errors} == {StaleHandle}


def test_a_closed_small_pool_does_not_stop_longer_messages() -> None:
    with TransferEngine.open() as engine, TransferEngine.open() as peer:
        peer.submit_recvs(64, 4, print).close()
        got: list[bytes] = []
        arrived = threading.Event()

        def take(message: bytes) -> None:
            got.append(message)
            if len(got) == 4:
                arrived.set()

        peer.submit_recvs(1024, 4, take)
        for _ in range(4):
            engine.submit_send(peer.address, b"x" * 500).wait(5)
        assert arrived.wait(5)


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_pools_and_watchers_that_were_closed_leave_nothing_behind() -> None:
    with TransferEngine.open() as engine:

        def cycle(count: int) -> None:
            for _ in range(count):
                engine.submit_recvs(4096, 16, print).close()
                engine.alloc_uvm_watcher(print).close()

        cycle(200)
        before = rss()
        cycle(600)  # 39 MB of buffers, if they stayed
        engine.progress()
        assert rss() - before < 8 << 20


@pytest.mark.parametrize("timeout", [None, "x", float("nan")])
def test_a_bad_timeout_of_close_closes_nothing(timeout: Any) -> None:
    engine = TransferEngine.open()
    with pytest.raises(ConfigError, match="close"):
        engine.close(timeout)
    assert not engine.closed
    engine.close(float("inf"))
    assert engine.closed


def test_registering_goes_on_after_shared_memory_was_closed() -> None:
    with TransferEngine.open() as engine:
        memory = engine.empty(1 << 20)
        memory.close()
        engine.reg_mr(bytearray(64))


def test_integers_of_numpy_are_integers() -> None:
    with TransferEngine.open() as engine:
        handle, _ = engine.reg_mr(bytearray(64))
        _, desc = engine.reg_mr(bytearray(64))
        n, imm = np.int64(8), engine.alloc_imm()
        expected = engine.expect_imm_count(np.int64(imm), np.int64(1))  # type: ignore[arg-type]
        engine.submit_single_write(n, np.int64(imm), (handle, n), (desc, n)).wait(5)  # type: ignore[arg-type]
        expected.wait(5)
        with pytest.raises(TypeError, match="'8'"):
            engine.submit_single_write("8", None, (handle, 0), (desc, 0))  # type: ignore[arg-type]


def test_a_wait_without_an_end_is_refused() -> None:
    with TransferEngine.open() as engine:
        never = engine.expect_imm_count(engine.alloc_imm(), 1)
        with pytest.raises(BadRange, match="nan"):
            never.wait(float("nan"))
        with pytest.raises(WaitTimeout):
            never.wait(0)


def test_waiting_tasks_that_gave_up_leave_no_callbacks() -> None:
    async def main(never: Any) -> None:
        for _ in range(50):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(never, 0.001)

    with TransferEngine.open() as engine:
        never = engine.expect_imm_count(engine.alloc_imm(), 1)
        asyncio.run(main(never))
        assert never._callbacks == []


@pytest.mark.parametrize("bad", ["local:a/b", "local:x.9", "local:a.0#zz"])
def test_a_misspelt_address_is_named(bad: str) -> None:
    with TransferEngine.open() as engine, pytest.raises(ConfigError, match="no address of backend 'local'"):
        engine.submit_send(bad, b"x")
