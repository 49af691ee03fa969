"""Memory of tensors, by address: what the inference side gives us to be written to, and how numpy looks at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange
from fabric_rlweights.dtypes import itemsize_of, name_of
from fabric_rlweights.meta import Layout, Quant, Tensor

__all__ = ["Span", "fitting", "span_of", "tensor_of"]


@dataclass(frozen=True)
class Span:
    """Bytes from the first to the last element of a tensor; `owner` keeps them alive."""

    address: int
    nbytes: int
    owner: object

    def bytes(self) -> NDArray[np.uint8]:
        """Return the bytes, not copied. The array keeps the owner alive, however long others hold it."""
        return np.asarray(_Owned(self))


class _Owned:
    """What numpy takes as the base of such an array."""

    def __init__(self, span: Span) -> None:
        self.owner = span.owner
        self.__array_interface__ = {
            "shape": (span.nbytes,), "typestr": "|u1", "data": (span.address, False), "version": 3,
        }  # fmt: skip


def _look(tensor: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
    if hasattr(tensor, "data_ptr"):
        if tensor.device.type != "cpu":
            raise BadRange(f"a tensor on {tensor.device}: this release serves CPU memory")
        item = tensor.element_size()
        return tensor.data_ptr(), tuple(tensor.shape), tuple(s * item for s in tensor.stride()), name_of(tensor.dtype)
    array = np.asarray(tensor)
    if array is not tensor and not hasattr(tensor, "__array_interface__"):
        raise BadRange(f"memory is given as a torch tensor or a numpy array, not as {type(tensor).__name__}")
    return array.__array_interface__["data"][0], array.shape, array.strides, name_of(array.dtype)


def span_of(tensor: Any) -> Span:
    """Return the memory of a torch or numpy tensor, which may have gaps. Raises BadRange for memory of a GPU."""
    address, shape, strides, dtype = _look(tensor)
    nbytes = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + itemsize_of(dtype)
    return Span(address, nbytes, tensor)


def fitting(rank: int, table: Tensor, tensor: Any) -> Span:
    """Return the memory of a tensor that is as its table says. Raises BadRange naming both if it is not.

    Bits may be held as integers of the same width, as numpy has no name for bfloat16.
    """
    what = f"rank {rank}: the memory given for {table.name}"
    if getattr(getattr(tensor, "flags", None), "writeable", True) is False:
        raise BadRange(f"{what} is read-only: give it memory that may be written to")
    _address, shape, strides, dtype = _look(tensor)
    item = itemsize_of(table.dtype)
    same = itemsize_of(dtype) == item and (dtype == table.dtype or dtype.removeprefix("u").startswith("int"))
    steps = [(mine, theirs) for mine, theirs, n in zip(strides, table.strides, shape, strict=False) if n > 1]
    if shape != table.shape or not same or any(mine != theirs for mine, theirs in steps):
        raise BadRange(
            f"{what} is {dtype} of shape {shape} with strides of {strides} bytes; the table says {table.dtype} of "
            f"shape {table.shape} with strides of {table.strides} bytes: make the table of this memory (tensor_of), "
            "or give the memory that it describes"
        )
    return span_of(tensor)


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
