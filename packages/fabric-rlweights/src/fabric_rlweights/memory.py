"""Memory of tensors, by address: what the inference side gives us to be written to, as numpy or torch see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_core import BadRange, TransferEngine
from fabric_rlweights.dtypes import itemsize_of, name_of
from fabric_rlweights.meta import Layout, Quant, Tensor
from fabric_rlweights.views import device_name

__all__ = ["Span", "copy", "fitting", "fresh", "span_of", "tensor_of"]


@dataclass(frozen=True)
class Span:
    """Bytes from the first to the last element of a tensor; `owner` keeps them alive."""

    address: int
    nbytes: int
    owner: object
    device: str = "cpu"

    def bytes(self) -> Any:
        """Return the bytes, not copied: a numpy array, of a GPU's memory a torch tensor of uint8.

        It keeps the owner alive, however long others hold it.
        """
        if self.device == "cpu":
            return np.asarray(_Owned(self))
        import torch

        owner: Any = self.owner
        storage = owner.untyped_storage()
        found = torch.empty(0, dtype=torch.uint8, device=self.device)
        return found.set_(storage, self.address - storage.data_ptr(), (self.nbytes,), (1,))

    @property
    def registered(self) -> Any:
        """What an engine registers."""
        return (self.address, self.nbytes, self.device)


class _Owned:
    """What numpy takes as the base of such an array."""

    def __init__(self, span: Span) -> None:
        self.owner = span.owner
        self.__array_interface__ = {
            "shape": (span.nbytes,), "typestr": "|u1", "data": (span.address, False), "version": 3,
        }  # fmt: skip


def fresh(engine: TransferEngine, nbytes: int, device: str) -> Span:
    """Return new memory on a device: of the host's, what peers can map."""
    if device == "cpu":
        memory = engine.empty(nbytes)
        return Span(memory.ptr, nbytes, memory)
    import torch

    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return Span(tensor.data_ptr(), nbytes, tensor, device)


def copy(target: Span, source: Span) -> None:
    """Copy bytes between spans of one device; on a GPU in the order of this thread's stream."""
    if target.device == "cpu":
        np.copyto(target.bytes(), source.bytes())
    else:
        target.bytes().copy_(source.bytes())


def _look(tensor: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
    if hasattr(tensor, "data_ptr"):
        device_name(tensor)
        item = tensor.element_size()
        return tensor.data_ptr(), tuple(tensor.shape), tuple(s * item for s in tensor.stride()), name_of(tensor.dtype)
    array = np.asarray(tensor)
    if array is not tensor and not hasattr(tensor, "__array_interface__"):
        raise BadRange(f"memory is given as a torch tensor or a numpy array, not as {type(tensor).__name__}")
    return array.__array_interface__["data"][0], array.shape, array.strides, name_of(array.dtype)


def span_of(tensor: Any) -> Span:
    """Return the memory of a torch (CPU, CUDA) or numpy tensor, which may have gaps. Raises BadRange for others."""
    address, shape, strides, dtype = _look(tensor)
    nbytes = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + itemsize_of(dtype)
    return Span(address, nbytes, tensor, device_name(tensor) if hasattr(tensor, "data_ptr") else "cpu")


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
