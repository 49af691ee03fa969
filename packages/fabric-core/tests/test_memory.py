"""What can be registered, and what is refused with the reason."""

from __future__ import annotations

import array
import mmap
from typing import Any

import numpy as np
import pytest

from fabric_core import BadRange, TransferEngine, Unsupported
from fabric_core.memory import range_of


def test_every_kind_of_host_memory_gives_its_address_and_length() -> None:
    numbers = np.arange(100, dtype=np.float32)
    assert range_of(numbers)[:2] == (numbers.ctypes.data, 400)
    assert range_of(numbers[10:20])[:2] == (numbers.ctypes.data + 40, 40)
    assert range_of(bytearray(7)).nbytes == 7
    assert range_of(array.array("Q", [1, 2])).nbytes == 16
    with mmap.mmap(-1, 8192) as area:
        held = range_of(area)
        assert held.nbytes == 8192
        assert held.ptr % 4096 == 0
        del held
    assert range_of((numbers.ctypes.data, 10))[:2] == (numbers.ctypes.data, 10)


def test_a_torch_tensor_is_taken_by_duck_typing() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(6, 5)
    assert range_of(x)[:2] == (x.data_ptr(), 120)
    assert range_of(x[2:4])[:2] == (x[2:4].data_ptr(), 40)
    with pytest.raises(BadRange, match=r"contiguous.*\(5, 6\)"):
        range_of(x.t())


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (np.zeros((4, 4))[:, 1], "C-contiguous"),
        (np.zeros(0), "empty"),
        (b"", "empty"),
        ("text", "str holds no memory"),
        (None, "NoneType holds no memory"),
        ((0, 10), "no range of memory"),
        ((4096, -1), "no range of memory"),
        ((1, 2, 3, 4), "address, bytes"),
        (((1 << 64) - 1, 10), "no range of memory"),
        ((4096, 1 << 20), "not .all. mapped"),
    ],
)
def test_what_holds_no_usable_memory_is_refused_with_the_reason(bad: object, text: str) -> None:
    with pytest.raises(BadRange, match=text):
        range_of(bad)


def test_device_memory_is_refused_as_unsupported() -> None:
    with pytest.raises(Unsupported, match="cuda"):
        range_of((4096, 10, "cuda:0"))


def test_read_only_memory_can_be_a_source_only() -> None:
    with TransferEngine.open() as engine:
        with pytest.raises(BadRange, match="write=False"):
            engine.reg_mr(b"constant")
        handle, desc = engine.reg_mr(b"constant", write=False)
        assert handle.nbytes == 8
        assert not desc.writable
        frozen = np.zeros(4)
        frozen.flags.writeable = False
        with pytest.raises(BadRange, match="read-only"):
            engine.reg_mr(frozen)


def test_a_handle_keeps_its_memory_alive_and_lets_go_when_closed() -> None:
    with TransferEngine.open() as engine:
        memory = bytearray(100)
        handle, _ = engine.reg_mr(memory)
        with pytest.raises(BufferError):
            memory.append(1)  # would move it
        handle.close()
        memory.append(1)


def test_memory_of_empty_is_shared_zeroed_and_takes_arrays() -> None:
    with TransferEngine.open() as engine:
        memory = engine.empty(1 << 20)
        x = np.frombuffer(memory, dtype=np.uint32)
        assert not x.any()
        x[7] = 9
        handle, desc = engine.reg_mr(x)
        assert (handle.ptr, handle.nbytes) == (memory.ptr, 1 << 20)
        assert desc.ptr == memory.ptr
        assert memory[28] == 9
        for bad in (0, -1, 1.5, None):
            with pytest.raises(ValueError, match="above 0"):
                engine.empty(bad)  # type: ignore[arg-type]


class Capsule:
    """Offers DLPack and nothing else."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __dlpack__(self) -> object:
        return self._array.__dlpack__()


def test_dlpack_is_memory_too() -> None:
    source = np.arange(4096, dtype=np.int16).reshape(64, 64)
    target = np.zeros_like(source)
    with TransferEngine.open() as engine:
        handle, _ = engine.reg_mr(Capsule(source))
        _, desc = engine.reg_mr(Capsule(target[:, :]))
        assert (handle.nbytes, desc.nbytes) == (8192, 8192)
        engine.submit_single_write(8192, None, (handle, 0), (desc, 0)).wait(5)
        assert (source == target).all()
        with pytest.raises(BadRange, match="contiguous"):
            engine.reg_mr(Capsule(source.T))
        with pytest.raises(BadRange, match="empty"):
            engine.reg_mr(Capsule(source[:0]))
        handle, _ = engine.reg_mr(Capsule(source[8:16]))
        assert handle.nbytes == 1024
