"""Registration: what can be registered, what a descriptor says, and how a registration ends."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fabric_core import FabricError, MrDesc, StaleHandle, TransferEngine
from fabric_core.conformance.kit import Engines, Kit, Memory, Pair, finish, pattern

SIZE = 8192


def address_of(buffer: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


MEMORIES: dict[str, Callable[[TransferEngine], Any]] = {
    "empty": lambda engine: engine.empty(SIZE),
    "bytearray": lambda engine: bytearray(SIZE),
    "memoryview": lambda engine: memoryview(bytearray(SIZE)),
    "array": lambda engine: array.array("d", [0.0] * (SIZE // 8)),
    "mmap": lambda engine: mmap.mmap(-1, SIZE),
    "ctypes": lambda engine: (ctypes.c_char * SIZE)(),
    "numpy": lambda engine: np.zeros(SIZE, np.uint8),
    "numpy-2d": lambda engine: np.zeros((8, SIZE // 32), np.float32),
    "numpy-view": lambda engine: np.zeros(3 * SIZE, np.uint8)[SIZE : 2 * SIZE],
}


@pytest.mark.parametrize("kind", MEMORIES)
def test_memory_of_any_kind_is_source_and_target(pair: Pair, kind: str) -> None:
    """C5: what has a buffer can be registered, as it is."""
    mine, theirs = MEMORIES[kind](pair.a), MEMORIES[kind](pair.b)
    memoryview(mine).cast("B")[:] = pattern(1, SIZE)
    source, _ = pair.a.reg_mr(mine)
    target, desc = pair.b.reg_mr(theirs)
    assert source.nbytes == target.nbytes == desc.nbytes == SIZE
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, 1)
    finish([pair.a.submit_single_write(SIZE, imm, (source, 0), (desc, 0)), arrived])
    assert bytes(memoryview(theirs).cast("B")) == pattern(1, SIZE)


def test_a_pointer_and_a_length_are_enough(pair: Pair) -> None:
    """C5: for memory that Python does not know."""
    mine, theirs = bytearray(pattern(2, SIZE)), bytearray(SIZE)
    source, _ = pair.a.reg_mr((address_of(mine), SIZE))
    target, desc = pair.b.reg_mr((address_of(theirs), SIZE))
    assert (target.ptr, desc.ptr) == (address_of(theirs), address_of(theirs))
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, 1)
    finish([pair.a.submit_single_write(SIZE, imm, (source, 0), (desc, 0)), arrived])
    assert theirs == mine


def test_torch_tensors_are_taken_as_they_are(pair: Pair) -> None:
    """C5: any dtype, also one that numpy does not have."""
    torch = pytest.importorskip("torch")
    mine, theirs = torch.arange(1024, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.bfloat16)
    source, _ = pair.a.reg_mr(mine)
    target, desc = pair.b.reg_mr(theirs)
    assert (source.ptr, target.nbytes) == (mine.data_ptr(), 2048)
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, 1)
    finish([pair.a.submit_single_write(2048, imm, (source, 0), (desc, 0)), arrived])
    assert torch.equal(mine, theirs)


def test_memory_that_may_not_be_written_cannot_be_a_target(engine: TransferEngine) -> None:
    """C6: bytes are read-only: as a source yes, open to peers no."""
    with pytest.raises((ValueError, TypeError, FabricError)):
        engine.reg_mr(b"\0" * SIZE)
    handle, _ = engine.reg_mr(pattern(3, SIZE), write=False)
    target = Memory(engine, SIZE)
    finish([engine.submit_single_write(SIZE, None, (handle, 0), (target.desc, 0))])


def test_memory_that_is_not_in_one_piece_is_refused(engine: TransferEngine) -> None:
    """C6: a column of a matrix is not one range."""
    with pytest.raises((ValueError, TypeError, BufferError)):
        engine.reg_mr(np.zeros((64, 64), np.uint8)[:, 1])


@pytest.mark.parametrize("bad", [(0, 64), (64, -1), (-1, 64), (2**64 - 32, 64), (2**70, 1)])
def test_ranges_that_cannot_be_memory_are_refused(engine: TransferEngine, bad: tuple[int, int]) -> None:
    """C6, C12: as numbers, before anything touches them."""
    with pytest.raises((ValueError, OverflowError)):
        engine.reg_mr(bad)


def test_empty_memory_is_zeroed_and_shareable(engine: TransferEngine) -> None:
    """C5: engine.empty() is a buffer like any other, of exactly that size."""
    for nbytes in (1, 4095, 4096, 100_001):
        buffer = engine.empty(nbytes)
        view = np.frombuffer(buffer, np.uint8)
        assert len(view) == nbytes
        assert not view.any()
        view[:] = 7
        handle, desc = engine.reg_mr(buffer)
        assert (handle.ptr, desc.nbytes) == (view.ctypes.data, nbytes)
        engine.dereg_mr(handle)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_empty_memory_of_no_size_is_refused(engine: TransferEngine, nbytes: int) -> None:
    """C6: at once."""
    with pytest.raises(ValueError):
        engine.empty(nbytes)


def test_regions_may_overlap(pair: Pair) -> None:
    """C5: two registrations of one buffer are two registrations."""
    theirs = bytearray(SIZE)
    _whole, desc = pair.b.reg_mr(theirs)
    half, part = pair.b.reg_mr(memoryview(theirs)[SIZE // 2 :])
    source = Memory(pair.a, SIZE, pattern(4, SIZE))
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, 2)
    finish([pair.a.submit_single_write(SIZE // 2, imm, (source.handle, 0), (desc, 0))])
    finish([pair.a.submit_single_write(SIZE // 2, imm, (source.handle, SIZE // 2), (part, 0)), arrived])
    assert theirs == pattern(4, SIZE)
    pair.b.dereg_mr(half)
    arrived = pair.b.expect_imm_count(imm, 1)
    finish([pair.a.submit_single_write(SIZE, imm, (source.handle, 0), (desc, 0)), arrived])  # the other one is whole


def test_memory_registered_again_at_the_same_place_is_another_registration(pair: Pair) -> None:
    """C6: a descriptor of the first registration does not open the second one."""
    theirs, source = bytearray(SIZE), Memory(pair.a, SIZE, pattern(5, SIZE))
    first, old = pair.b.reg_mr(theirs)
    finish([pair.a.submit_single_write(1, None, (source.handle, 0), (old, 0))])
    pair.b.dereg_mr(first)
    theirs[:] = bytes(SIZE)
    _second, new = pair.b.reg_mr(theirs)
    assert old != new
    with pytest.raises(FabricError):
        pair.a.submit_single_write(SIZE, None, (source.handle, 0), (old, 0)).wait(10)
    assert theirs == bytes(SIZE)
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, 1)
    finish([pair.a.submit_single_write(SIZE, imm, (source.handle, 0), (new, 0)), arrived])
    assert theirs == pattern(5, SIZE)


def test_a_handle_can_close_itself(engine: TransferEngine) -> None:
    """C6: handle.close() and engine.dereg_mr(handle) are the same; a second time is harmless or StaleHandle."""
    one, two = Memory(engine, 64), Memory(engine, 64)
    one.handle.close()
    engine.dereg_mr(two.handle)
    for memory in (one, two):
        try:
            engine.dereg_mr(memory.handle)
        except StaleHandle:
            pass
        with pytest.raises(StaleHandle):
            engine.submit_single_write(1, None, (memory.handle, 0), (Memory(engine, 64).desc, 0))


def test_a_registration_keeps_its_buffer_alive(engine: TransferEngine) -> None:
    """C7: memory a NIC may touch is not freed under it, and is freed after."""

    class Buffer(bytearray):
        """One that can be watched."""

    buffer = Buffer(pattern(6, SIZE))
    gone = weakref.ref(buffer)
    handle, desc = engine.reg_mr(buffer)
    del buffer
    gc.collect()
    assert gone() is not None
    target = Memory(engine, SIZE)
    finish([engine.submit_single_write(SIZE, None, (handle, 0), (target.desc, 0))])
    assert target.get() == pattern(6, SIZE)
    engine.dereg_mr(handle)
    del handle, desc
    gc.collect()
    assert gone() is None


def test_a_registration_outlives_the_variables_it_was_made_with(engine: TransferEngine) -> None:
    """C7: until dereg_mr or close() peers may write there, so the memory stays, whoever keeps a handle or not."""

    class Buffer(bytearray):
        """One that can be watched."""

    def register() -> tuple[weakref.ref[Buffer], MrDesc]:
        buffer = Buffer(SIZE)
        return weakref.ref(buffer), engine.reg_mr(buffer)[1]

    alive, desc = register()
    gc.collect()
    assert alive() is not None, "the memory was freed while it is registered"
    source = Memory(engine, SIZE, pattern(7, SIZE))
    finish([engine.submit_single_write(SIZE, None, (source.handle, 0), (desc, 0))])
    assert bytes(alive() or b"") == pattern(7, SIZE)


def test_registering_many_regions_leaves_all_usable(pair: Pair, kit: Kit) -> None:
    """C5: and none is confused with another."""
    count = kit.scaled(50, 300, 3000)
    sources = [Memory(pair.a, 128, pattern(k, 128), shared=False) for k in range(count)]
    targets = [Memory(pair.b, 128, shared=False) for _ in range(count)]
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, count)
    finish(
        pair.a.submit_single_write(128, imm, (source.handle, 0), (target.desc, 0))
        for source, target in zip(sources, targets, strict=True)
    )
    finish([arrived])
    assert [target.get() for target in targets] == [source.get() for source in sources]


def test_a_region_can_be_written_by_many_peers(engines: Engines) -> None:
    """C5: one descriptor, any number of holders."""
    receiver, senders = engines.open(), [engines.open() for _ in range(4)]
    target = Memory(receiver, 4 * 1000)
    imm = receiver.alloc_imm()
    arrived = receiver.expect_imm_count(imm, 4)
    blob = target.desc.to_bytes()
    sources = [Memory(sender, 1000, pattern(k, 1000)) for k, sender in enumerate(senders)]
    finish(
        sender.submit_single_write(1000, imm, (source.handle, 0), (MrDesc.from_bytes(blob), k * 1000))
        for k, (sender, source) in enumerate(zip(senders, sources, strict=True))
    )
    finish([arrived])
    assert target.get() == b"".join(pattern(k, 1000) for k in range(4))
