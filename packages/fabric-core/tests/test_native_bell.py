"""What native callers need beside the submits: numbers of Python's objects, and a bell at the end of an expectation."""

from __future__ import annotations

from typing import Any

import pytest

from fabric_core import TransferEngine, native_api
from fabric_core.native_lib import ffi, lib

TABLE = ffi.cast("const fab_native_table *", native_api())


class Bell:
    """Counts how often it was rung."""

    def __init__(self) -> None:
        self.rung = 0
        self.function = ffi.callback("void(void *)", self._ring)

    def _ring(self, _arg: Any) -> None:
        self.rung += 1

    def hang(self, engine: TransferEngine, expectation: Any) -> int:
        core = ffi.cast("fab_engine *", engine.native_handle)
        rc: int = TABLE.expect_bell(core, expectation.native_handle, self.function, ffi.NULL)
        return rc


def write(engine: TransferEngine, imm: int) -> None:
    """One write to ourselves by the numbers that the objects have in C, and its end."""
    source, _ = engine.reg_mr(engine.empty(64), write=False)
    _, desc = engine.reg_mr(engine.empty(64))
    core = ffi.cast("fab_engine *", engine.native_handle)
    target = engine.native_target(source, desc)
    handle = TABLE.submit_write(core, source.native_handle, 0, target, 0, 64, imm, -1, 0, 0)
    assert handle > 0
    assert TABLE.transfer_wait(core, handle, 10 * 10**9) == lib.FAB_DONE
    assert TABLE.transfer_release(core, handle) == 0
    source.close()
    assert source.native_handle == 0


def test_it_rings_once_when_the_count_is_there() -> None:
    with TransferEngine.open() as engine:
        imm, bell = engine.alloc_imm(), Bell()
        expectation = engine.expect_imm_count(imm, 2)
        assert bell.hang(engine, expectation) == 0
        write(engine, imm)
        assert engine.imm_count(imm) == 1
        assert bell.rung == 0
        write(engine, imm)
        expectation.wait(10)
        engine.free_imm(imm)  # after it none is under way
        assert bell.rung == 1


def test_it_rings_at_once_for_what_has_ended() -> None:
    with TransferEngine.open() as engine:
        imm, bell = engine.alloc_imm(), Bell()
        write(engine, imm)
        expectation = engine.expect_imm_count(imm, 1)
        expectation.wait(10)
        assert bell.hang(engine, expectation) == 0
        assert bell.rung == 1


@pytest.mark.parametrize("how", ["free", "cancel", "deadline", "close"])
def test_it_rings_for_a_bad_end_too(how: str) -> None:
    bell = Bell()
    with TransferEngine.open() as engine:
        imm = engine.alloc_imm()
        expectation = engine.expect_imm_count(imm, 1, timeout=0.01 if how == "deadline" else 60.0)
        assert bell.hang(engine, expectation) == 0
        if how == "free":
            engine.free_imm(imm)
        elif how == "cancel":
            expectation.cancel()
        elif how == "close":
            engine.close()
        assert expectation.exception() or how == "deadline"
        if how == "deadline":
            with pytest.raises(Exception, match="ETIME"):
                expectation.wait(30)
        if how != "close":
            engine.close()
    assert bell.rung == 1


def test_a_number_that_is_over_is_refused() -> None:
    with TransferEngine.open() as engine:
        core = ffi.cast("fab_engine *", engine.native_handle)
        assert TABLE.expect_bell(core, 0, Bell().function, ffi.NULL) < 0
