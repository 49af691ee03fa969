"""A box of host memory to a GPU's: strips of rows at one distance, each a single copy of a copy engine.

torch copies such boxes by way of a second copy in host memory, which no watermark would know of; the driver does not.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any, NamedTuple

import numpy as np

from fabric_core import BackendError
from fabric_rlweights.boxes import Ints
from fabric_rlweights.views import Bytes

__all__ = ["Strip", "bounce", "copy_strip", "strips"]

CHUNK = 1 << 20  #: bytes of that buffer
_HOST, _DEVICE = 1, 2


class Strip(NamedTuple):
    """Runs at one distance: where the first lies, how many there are, and how far they are apart. Bytes."""

    source: int
    target: int
    runs: int
    source_step: int
    target_step: int


def strips(source: Ints, target: Ints) -> list[Strip]:
    """Return runs at `source` and `target` [n] as strips, in their order."""
    found: list[Strip] = []
    begin = 0
    change = np.flatnonzero((np.diff(source, 2) != 0) | (np.diff(target, 2) != 0)) + 2
    ends = iter([*change.tolist(), len(source)])
    end = next(ends)
    while begin < len(source):
        while end <= begin + 1 and end < len(source):  # a step between two strips changes twice: in and out
            end = next(ends)
        count = end - begin
        next_ = begin + 1 if count > 1 else begin
        steps = int(source[next_] - source[begin]), int(target[next_] - target[begin])
        found.append(Strip(int(source[begin]), int(target[begin]), count, *steps))
        begin = end
    return found


def bounce() -> Any:
    """Return CHUNK bytes for `copy_strip`, in pages of their own: no part of them is pinned."""
    import torch

    return torch.frombuffer(mmap.mmap(-1, CHUNK), dtype=torch.uint8)


def copy_strip(room: Any, memory: Bytes, strip: Strip, run: int, stream: int, chunk: Any) -> None:
    """Copy on the stream: runs of `run` bytes of `memory` to `room`, a flat uint8 tensor of a GPU.

    The driver refuses host memory of which another registration has pinned a part only. That goes through `chunk`, a
    `bounce` of this thread's: what is not pinned has been read when the call returns.
    """
    import torch

    host = torch.frombuffer(memory, dtype=torch.uint8)
    if strip.runs > 1 and strip.source_step >= run and strip.target_step >= run:
        source, target = memory.ctypes.data + strip.source, room.data_ptr() + strip.target
        if _copy_2d(source, target, strip, run, stream) == 0:
            return
    for number in range(strip.runs):
        begin, place = strip.source + number * strip.source_step, strip.target + number * strip.target_step
        part, there = host[begin : begin + run], room[place : place + run]
        try:
            there.copy_(part, non_blocking=True)
        except RuntimeError:
            for low in range(0, run, CHUNK):
                piece = chunk[: min(CHUNK, run - low)]
                piece.copy_(part[low : low + CHUNK])
                there[low : low + CHUNK].copy_(piece, non_blocking=True)


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of cuda.h."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t), ("srcY", ctypes.c_size_t), ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p), ("srcDevice", ctypes.c_uint64), ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t), ("dstY", ctypes.c_size_t), ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p), ("dstDevice", ctypes.c_uint64), ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t),
    )  # fmt: skip


@functools.cache
def _driver() -> Any:
    try:
        call = ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    except (OSError, AttributeError) as error:
        raise BackendError(f"the CUDA driver cannot be loaded, though torch uses it: {error}") from None
    call.argtypes, call.restype = (ctypes.POINTER(_Copy2D), ctypes.c_void_p), ctypes.c_int
    return call


def _copy_2d(source: int, target: int, strip: Strip, run: int, stream: int) -> int:
    """Return the driver's answer; 0: it was handed out. The thread's context is torch's."""
    words = _Copy2D(
        srcMemoryType=_HOST, srcHost=source, srcPitch=strip.source_step, dstMemoryType=_DEVICE, dstDevice=target,
        dstPitch=strip.target_step, WidthInBytes=run, Height=strip.runs,
    )  # fmt: skip
    answer: int = _driver()(ctypes.byref(words), stream)
    return answer
