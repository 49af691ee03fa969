"""From whatever holds bytes to (address, length): tensors, arrays, buffers, and pairs, by duck typing.

torch and numpy are never imported here: a tensor is recognised by its methods.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fabric_core.errors import BadRange, Unsupported
from fabric_core.native_lib import ffi, lib

__all__ = ["Range", "range_of"]


class Range(NamedTuple):
    """A range of memory, and what keeps it alive."""

    ptr: int
    nbytes: int
    device: str
    owner: object


def _tensor(x: Any) -> Range:
    if not x.is_contiguous():
        raise BadRange(
            f"a tensor must be contiguous to be registered; this one has shape {tuple(x.shape)} and strides "
            f"{tuple(x.stride())}: register its base, or a .contiguous() copy"
        )
    device = str(x.device)
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise Unsupported(f"memory on {device} cannot be registered: copy to a CPU tensor, or to engine.empty()")
    ptr = int(x.data_ptr())
    return Range(ptr, int(x.numel()) * int(x.element_size()), "cpu" if kind == "cpu" else _gpu(ptr), x)


def _gpu(ptr: int) -> str:
    """The GPU that an address belongs to. Raises Unsupported if the driver knows no such memory."""
    from fabric_core import gpu

    device = gpu.device_of(ptr)
    if device == "cpu":
        raise Unsupported(
            f"address {ptr:#x} is given as cuda memory, but: {gpu.why_not() or 'the driver does not know it'}"
        )
    return device


def _cuda_array(x: Any) -> Range:
    face = x.__cuda_array_interface__
    shape, strides, (ptr, _readonly) = face["shape"], face.get("strides"), face["data"]
    size = int(face["typestr"][2:])
    if strides is not None:
        step = size
        for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
            if extent > 1 and stride != step:
                raise BadRange(f"a CUDA array must be C-contiguous; this one has shape {shape} and strides {strides}")
            step *= extent
    nbytes = math.prod(shape) * size
    return Range(int(ptr), nbytes, _gpu(int(ptr)) if nbytes else "cpu", x)


def _dlpack(x: Any) -> Range:
    from fabric_core.dlpack import tensor_of

    t = tensor_of(x)
    if t.nbytes <= 0:
        raise BadRange("an empty tensor cannot be registered")
    return Range(t.ptr, t.nbytes, _gpu(t.ptr) if t.gpu else "cpu", [x, t.capsule])


def _pair(x: tuple[Any, ...]) -> Range:
    if len(x) not in (2, 3) or not all(isinstance(number, int) for number in x[:2]):
        raise BadRange(f"raw memory is given as (address, bytes) or (address, bytes, device), not {x!r}")
    ptr, nbytes = x[:2]
    device = str(x[2]) if len(x) == 3 else "cpu"
    if ptr <= 0 or nbytes <= 0 or ptr + nbytes > 1 << 64:
        raise BadRange(f"address {ptr:#x} with {nbytes} bytes is no range of memory")
    if device.partition(":")[0] == "cuda":
        from fabric_core import gpu

        found = _gpu(ptr)
        if device not in (found, "cuda"):
            raise BadRange(f"address {ptr:#x} lies on {found}, not on {device}")
        if gpu.device_of(ptr + nbytes - 1) != found:  # a kernel that went there would end the context
            raise BadRange(f"address {ptr:#x} with {nbytes} bytes is not (all) memory of {found}")
        return Range(ptr, nbytes, found, None)
    if device.partition(":")[0] != "cpu":
        raise Unsupported(f"memory on {device} cannot be registered")
    if not lib.fab_range_mapped(ptr, nbytes):
        raise BadRange(f"address {ptr:#x} with {nbytes} bytes is not (all) mapped in this process")
    return Range(ptr, nbytes, "cpu", None)


def range_of(x: Any) -> Range:
    """Return the memory of `x`: torch tensor, numpy array, any C-contiguous buffer, mmap, CUDA array, DLPack, or an
    (address, bytes) or (address, bytes, device) tuple.

    Raises BadRange (not contiguous, empty, no such thing) or Unsupported (memory that nobody here can reach).
    """
    if isinstance(x, tuple):
        found = _pair(x)
    elif hasattr(x, "data_ptr") and hasattr(x, "is_contiguous"):
        found = _tensor(x)
    elif getattr(x, "__cuda_array_interface__", None) is not None:
        found = _cuda_array(x)
    else:
        try:
            view = memoryview(x)
        except TypeError:
            if hasattr(x, "__dlpack__"):
                return _dlpack(x)
            raise BadRange(
                f"a {type(x).__name__} holds no memory that can be registered; "
                "give a tensor, an array, a buffer or an (address, bytes) tuple"
            ) from None
        if not view.c_contiguous:
            raise BadRange(f"a buffer must be C-contiguous; this one has shape {view.shape} and strides {view.strides}")
        if view.nbytes == 0:
            raise BadRange("an empty buffer cannot be registered")
        # from_buffer holds the buffer, so that its memory can neither move nor be freed
        held = ffi.from_buffer("char[]", x, require_writable=False)
        found = Range(int(ffi.cast("uintptr_t", held)), view.nbytes, "cpu", (x, held))
    if found.nbytes <= 0:
        raise BadRange("an empty tensor cannot be registered")
    return found
