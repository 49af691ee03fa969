"""Watchers: a 64-bit word that the host, or a GPU, writes, and a callback that follows it."""

from __future__ import annotations

import ctypes

from fabric_core import TransferEngine
from fabric_core.conformance.kit import Calls, Engines, Kit, eventually


def test_a_change_of_the_word_is_told(engine: TransferEngine) -> None:
    """C10: old and new value, through .value or through the pointer."""
    calls = Calls()
    watcher = engine.alloc_uvm_watcher(calls)
    assert watcher.value == 0
    watcher.value = 5
    calls.wait(1)
    assert calls.args[0] == (0, 5)
    ctypes.c_uint64.from_address(watcher.ptr).value = 9
    calls.wait(2)
    assert calls.args[1] == (5, 9)
    assert watcher.value == 9


def test_fast_changes_may_be_put_together_but_none_is_missed(engine: TransferEngine, kit: Kit) -> None:
    """C3: the callbacks form a chain without a gap that ends at the last value."""
    calls, last = Calls(), kit.scaled(1000, 10_000, 1_000_000)
    watcher = engine.alloc_uvm_watcher(calls)
    for value in range(1, last + 1):
        watcher.value = value
    eventually(lambda: bool(calls.args) and calls.args[-1][1] == last, "the last value is told")
    watcher.close()
    steps = [0, *(new for _old, new in calls.args)]
    assert [old for old, _new in calls.args] == steps[:-1]
    assert steps == sorted(set(steps)), "values were told out of order or twice"


def test_watchers_do_not_disturb_each_other(engine: TransferEngine) -> None:
    """C9: each has its own callback."""
    calls = [Calls() for _ in range(8)]
    watchers = [engine.alloc_uvm_watcher(one) for one in calls]
    for k, watcher in enumerate(watchers):
        watcher.value = 100 + k
    for k, one in enumerate(calls):
        one.wait(1)
        assert one.args[-1][1] == 100 + k


def test_a_raising_watcher_is_reported_and_goes_on(engines: Engines, engine: TransferEngine) -> None:
    """C9: like any callback."""
    calls = Calls()

    def boom(old: int, new: int) -> None:
        calls(old, new)
        raise RuntimeError("from a watcher")

    watcher = engine.alloc_uvm_watcher(boom)
    watcher.value = 1
    calls.wait(1)
    watcher.value = 2
    calls.wait(2)
    assert all(isinstance(error, RuntimeError) for error in engines.errors(engine).wait(2))


def test_a_closed_watcher_is_silent(engine: TransferEngine) -> None:
    """C7: after close() nobody reads the word, and nobody is called."""
    closed, other = Calls(), Calls()
    watcher = engine.alloc_uvm_watcher(closed)
    watcher.value = 1
    closed.wait(1)
    watcher.close()
    watcher.close()
    second = engine.alloc_uvm_watcher(other)
    second.value = 1
    other.wait(1)
    engine.close()
    assert closed.count == 1


def test_an_idle_engine_has_no_watcher_thread(engines: Engines) -> None:
    """C8: threads come with the first watcher and go with the engine."""
    import os

    engine = engines.open()
    before = len(os.listdir("/proc/self/task"))
    calls = Calls()
    engine.alloc_uvm_watcher(calls).value = 3
    calls.wait(1)
    assert len(os.listdir("/proc/self/task")) <= before + 1
    engine.close()
    eventually(lambda: len(os.listdir("/proc/self/task")) < before, "the engine's threads end with it")
