"""Words and lists of `gpu_nic/words.cuh` as they lie in memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

LINE = 64
MAIL = ("counted", "packed", "summed", "rows_here", "sums_here", "begun")


class Mail(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32 * 16) for name in MAIL),
        ("heads", ctypes.c_uint64 * 16),
        ("gone", ctypes.c_uint64),
        ("noted", ctypes.c_uint64),
    )


class Local(ctypes.Structure):
    _fields_ = (
        ("epoch", ctypes.c_uint32 * 16), ("done", ctypes.c_uint32 * 2), ("broken", ctypes.c_uint32),
        ("unreachable", ctypes.c_uint32),
    )  # fmt: skip


def array(at: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Any:
    """Memory at an address as an array."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if strides else int(np.prod(shape))
    span = max(1, size + np.dtype(dtype).itemsize if strides else size * np.dtype(dtype).itemsize)
    return np.ndarray(shape, dtype, (ctypes.c_uint8 * span).from_address(at), 0, strides)
