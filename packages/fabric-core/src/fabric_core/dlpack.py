"""Memory behind a DLPack capsule (https://dmlc.github.io/dlpack): for arrays without a buffer or CUDA's interface.

Only the version without flags is asked for, which every producer has.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from fabric_core.errors import BadRange, Unsupported

__all__ = ["Tensor", "tensor_of"]

_CPU, _CUDA, _PINNED = 1, 2, 3


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Tensor(NamedTuple):
    """Where the bytes of a capsule are, and the capsule, which keeps them."""

    ptr: int
    nbytes: int
    gpu: bool
    capsule: object


def _pointer(capsule: object) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(get(capsule, b"dltensor"))


def tensor_of(x: Any) -> Tensor:
    """Return the memory of an object with `__dlpack__`.

    Raises BadRange (not C-contiguous, elements that are no whole bytes) or Unsupported (neither host nor CUDA memory).
    """
    capsule = x.__dlpack__()
    t = _DLTensor.from_address(_pointer(capsule))
    if t.device_type not in (_CPU, _CUDA, _PINNED):
        raise Unsupported(
            f"a {type(x).__name__} on DLPack device {t.device_type} cannot be registered: copy it to the CPU"
        )
    bits = t.bits * t.lanes
    shape = [t.shape[i] for i in range(t.ndim)]
    if bits % 8:
        raise BadRange(f"elements of {bits} bits cannot be registered: give the bytes that hold them")
    step = 1
    for i in reversed(range(t.ndim)):
        if t.strides and shape[i] > 1 and t.strides[i] != step:
            strides = [t.strides[k] for k in range(t.ndim)]
            raise BadRange(f"a tensor must be C-contiguous; this one has shape {shape} and strides {strides}")
        step *= shape[i]
    return Tensor((t.data or 0) + t.byte_offset, step * (bits // 8), t.device_type == _CUDA, capsule)
