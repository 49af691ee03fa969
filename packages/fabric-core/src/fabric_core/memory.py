"""From whatever holds bytes to (address, length): tensors, arrays, buffers, and pairs, by duck typing.

torch and numpy are never imported here: a tensor is recognised by its methods.
"""

from __future__ import annotations

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
    if device.partition(":")[0] != "cpu":
        raise Unsupported(f"memory on {device} cannot be registered yet: copy to a CPU tensor, or to engine.empty()")
    return Range(int(x.data_ptr()), int(x.numel()) * int(x.element_size()), "cpu", x)


def _pair(x: tuple[Any, ...]) -> Range:
    if len(x) not in (2, 3) or not all(isinstance(number, int) for number in x[:2]):
        raise BadRange(f"raw memory is given as (address, bytes) or (address, bytes, device), not {x!r}")
    ptr, nbytes = x[:2]
    device = str(x[2]) if len(x) == 3 else "cpu"
    if ptr <= 0 or nbytes <= 0 or ptr + nbytes > 1 << 64:
        raise BadRange(f"address {ptr:#x} with {nbytes} bytes is no range of memory")
    if device.partition(":")[0] != "cpu":
        raise Unsupported(f"memory on {device} cannot be registered yet")
    if not lib.fab_range_mapped(ptr, nbytes):
        raise BadRange(f"address {ptr:#x} with {nbytes} bytes is not (all) mapped in this process")
    return Range(ptr, nbytes, "cpu", None)


def range_of(x: Any) -> Range:
    """Return the memory of `x`: torch tensor, numpy array, any C-contiguous buffer, mmap, or an (address, bytes) tuple.

    Raises BadRange (not contiguous, empty, no such thing) or Unsupported (device memory).
    """
    if isinstance(x, tuple):
        found = _pair(x)
    elif hasattr(x, "data_ptr") and hasattr(x, "is_contiguous"):
        found = _tensor(x)
    elif getattr(x, "__cuda_array_interface__", None) is not None:
        raise Unsupported("CUDA arrays cannot be registered yet: copy to a CPU array, or to engine.empty()")
    else:
        try:
            view = memoryview(x)
        except TypeError:
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
