"""Many threads on one engine, and what is left when engines are closed (C1, C8)."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fabric_core import EngineClosed
from fabric_core.conformance.kit import Calls, Engines, Kit, Memory, Pair, eventually, finish, pattern

THREADS = 8


def in_threads(work: list[threading.Thread]) -> None:
    for thread in work:
        thread.start()
    for thread in work:
        thread.join(100)
        assert not thread.is_alive()


def test_ten_thousand_operations_from_eight_threads(engines: Engines, kit: Kit) -> None:
    """C1, C4: each ends once, each counts once, each byte is where it belongs."""
    each, length = kit.scaled(125, 1250, 12_500), 64
    pair, total = engines.pair(2 if max(kit.nics) >= 2 else 1, 1), THREADS * each
    source, target = Memory(pair.a, total * length, pattern(1, total * length)), Memory(pair.b, total * length)
    imm, calls, failures = pair.b.alloc_imm(), Calls(), Calls()
    arrived = pair.b.expect_imm_count(imm, total, timeout=100)

    def work(first: int) -> None:
        try:
            finish(
                [
                    pair.a.submit_single_write(
                        length, imm, (source.handle, k * length), (target.desc, k * length), calls
                    )
                    for k in range(first, first + each)
                ],
                timeout=100,
            )
        except BaseException as error:
            failures(error)

    in_threads([threading.Thread(target=work, args=(k * each,), daemon=True) for k in range(THREADS)])
    assert failures.firsts == []
    finish([arrived], timeout=100)
    calls.wait(total, timeout=100)
    assert target.get() == source.get()
    assert pair.b.free_imm(imm) == 0
    pair.a.close()
    assert len(set(map(id, calls.firsts))) == calls.count == total


def test_threads_wait_for_one_operation_together(pair: Pair) -> None:
    """C1: all are released by one end."""
    imm, target, ends = pair.b.alloc_imm(), Memory(pair.b, 64), Calls()
    arrived = pair.b.expect_imm_count(imm, 1)
    started = threading.Barrier(THREADS + 1)

    def wait() -> None:
        started.wait(20)
        arrived.wait(20)
        ends(1)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    started.wait(20)
    finish([pair.a.submit_barrier(None, None, imm, [target.desc])])
    ends.wait(THREADS)


def test_registering_while_others_transfer(pair: Pair, kit: Kit) -> None:
    """C8: set-up from some threads, traffic from others."""
    turns, failures = kit.scaled(20, 100, 1000), Calls()
    source, target = Memory(pair.a, 4096, pattern(2, 4096)), Memory(pair.b, 4096)

    def register() -> None:
        try:
            for _ in range(turns):
                memory = Memory(pair.a, 4096, pattern(3, 4096), shared=False)
                finish([pair.a.submit_single_write(4096, None, (memory.handle, 0), (target.desc, 0))])
                pair.a.dereg_mr(memory.handle)
        except BaseException as error:
            failures(error)

    def transfer() -> None:
        try:
            for _ in range(turns):
                finish([pair.a.submit_single_write(4096, None, (source.handle, 0), (target.desc, 0))])
        except BaseException as error:
            failures(error)

    in_threads([threading.Thread(target=one, daemon=True) for one in (register, transfer) * 3])
    assert failures.firsts == []


@pytest.mark.parametrize("closers", [1, 4])
def test_close_while_threads_submit(engines: Engines, closers: int) -> None:
    """C1: each submit is either refused or ends; nobody hangs and nothing crashes."""
    pair = engines.pair()
    source, target = Memory(pair.a, 4096), Memory(pair.b, 4096)
    running, taken, refusals = threading.Semaphore(0), Calls(), Calls()

    def submit() -> None:
        try:
            for k in range(1_000_000):
                taken(pair.a.submit_single_write(4096, None, (source.handle, 0), (target.desc, 0)))
                if k == 20:
                    running.release()
        except Exception as error:
            refusals(type(error).__name__)

    threads = [threading.Thread(target=submit, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert running.acquire(timeout=20)
    in_threads([threading.Thread(target=pair.a.close, daemon=True) for _ in range(closers)])
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert all(transfer.done for transfer in taken.firsts)
    assert set(refusals.wait(4)) <= {"EngineClosed", "StaleHandle"}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_leaves_the_parents_engine_alone(pair: Pair) -> None:
    """C1: the child has no threads of the engine: it is told so, and its end does not hurt the parent."""
    source, target = Memory(pair.a, 64, pattern(4, 64)), Memory(pair.b, 64)
    finish([pair.a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0))])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pair.a.submit_send(pair.b.address, b"from the child")
        except EngineClosed:
            code = 0
        finally:
            os._exit(code)
    eventually(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None, "the child ends")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    imm, calls = pair.b.alloc_imm(), Calls()
    arrived = pair.b.expect_imm_count(imm, 1, calls)
    finish([pair.a.submit_single_write(64, imm, (source.handle, 0), (target.desc, 0)), arrived])
    calls.wait()


def resources() -> dict[str, int]:
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared mappings": sum("memfd:" in line or "/dev/shm" in line for line in mappings),
    }


def resident_kib() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])


def test_nothing_is_left_after_fifty_open_and_close_cycles(kit: Kit) -> None:
    """Leaks: descriptors, threads, mappings and memory; with traffic, and with work in flight at close."""

    def cycle(k: int) -> None:
        with kit.open(nics=max(kit.nics)) as a, kit.open() as b:
            source, target = Memory(a, 65_536, pattern(1, 65_536)), Memory(b, 65_536, shared=bool(k % 2))
            b.submit_recvs(256, 4, lambda message: None)
            finish([a.submit_send(b.address, b"hello")])
            imm = b.alloc_imm()
            arrived = b.expect_imm_count(imm, 1)
            finish([a.submit_single_write(65_536, imm, (source.handle, 0), (target.desc, 0)), arrived])
            a.alloc_uvm_watcher(lambda old, new: None)
            a.submit_single_write(65_536, None, (source.handle, 0), (target.desc, 0))
            b.expect_imm_count(imm, 1)

    def lowest_memory(cycles: int) -> int:
        """Of the whole span: engines that the collector has not taken yet do not count as growth."""
        sizes = []
        for k in range(cycles):
            cycle(k)
            sizes.append(resident_kib())
        return min(sizes)

    count = kit.scaled(10, 25, 250)
    lowest_memory(5)
    before, memory = resources(), lowest_memory(count)
    grown = lowest_memory(count) - memory
    try:
        eventually(lambda: all(now <= before[what] for what, now in resources().items()), "nothing grew", timeout=5)
    except BaseException:
        pytest.fail(f"before {before}, after {2 * count} cycles {resources()}")
    assert grown < 2048 + 40 * count, f"{grown} KiB more after {count} cycles"


ENDINGS = {
    "an engine that nobody closed": "",
    "an engine with work in flight": "keep = engine.submit_send(engine.address, b'nobody receives')",
    "an engine in a reference cycle": "cycle = [engine]; cycle.append(cycle); del engine, cycle",
    "a callback that is still to come": "engine.expect_imm_count(engine.alloc_imm(), 1, print, timeout=0.01)",
    "sys.exit in the middle": "engine.submit_recvs(64, 4, print); import sys; sys.exit(0)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_can_end_at_any_time(kit: Kit, ending: str) -> None:
    """C1: no crash and no hang at exit, whatever was left open."""
    script = (
        "import importlib\n"
        f"for name in {list(kit.imports)!r}: importlib.import_module(name)\n"
        "from fabric_core import TransferEngine\n"
        f"engine = TransferEngine.open('cpu', {kit.backend!r}, **{kit.settings!r})\n"
        "handle, desc = engine.reg_mr(bytearray(64))\n"
        "engine.submit_single_write(64, None, (handle, 0), (desc, 0)).wait(10)\n" + ENDINGS[ending] + "\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Fatal" not in ended.stderr
    assert "Traceback" not in ended.stderr
