"""Memory of tensors, by address: what the inference side gives us to be written to, and how numpy looks at it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange
from fabric_rlweights.dtypes import itemsize_of, name_of
from fabric_rlweights.meta import Layout, Quant, Tensor

__all__ = ["Span", "span_of", "tensor_of"]


@dataclass(frozen=True)
class Span:
    """Bytes from the first to the last element of a tensor; `owner` keeps them alive."""

    address: int
    nbytes: int
    owner: object

    def bytes(self) -> NDArray[np.uint8]:
        """Return the bytes, not copied."""
        found: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))
        return found


def _look(tensor: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
    if hasattr(tensor, "data_ptr"):
        if tensor.device.type != "cpu":
            raise BadRange(f"a tensor on {tensor.device}: this release serves CPU memory")
        item = tensor.element_size()
        return tensor.data_ptr(), tuple(tensor.shape), tuple(s * item for s in tensor.stride()), name_of(tensor.dtype)
    array = np.asarray(tensor)
    return array.__array_interface__["data"][0], array.shape, array.strides, name_of(array.dtype)


def span_of(tensor: Any) -> Span:
    """Return the memory of a torch or numpy tensor, which may have gaps. Raises BadRange for memory of a GPU."""
    address, shape, strides, dtype = _look(tensor)
    nbytes = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + itemsize_of(dtype)
    return Span(address, nbytes, tensor)


def tensor_of(
    name: str,
    tensor: Any,
    *,
    layout: Layout = "direct",
    quant: Quant | None = None,
    dtype: str | None = None,
    keep: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (),
) -> Tensor:
    """Describe a torch or numpy tensor for an engine's table. `dtype`: where numpy has no name for it (bfloat16)."""
    address, shape, strides, own = _look(tensor)
    return Tensor(
        name=name,
        shape=shape,
        strides=strides,
        dtype=dtype or own,
        address=address,
        layout=layout,
        quant=quant,
        keep=keep,
    )
