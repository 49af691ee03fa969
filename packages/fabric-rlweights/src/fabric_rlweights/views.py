"""Memory as bytes, wherever it lies: numpy arrays of the host's, flat uint8 tensors of torch's of a GPU's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange, TransferEngine, Unsupported
from fabric_rlweights.dtypes import bits_of, itemsize_of, torch_dtype

__all__ = ["Bytes", "bits_view", "check_served", "device_name", "flat", "on_gpu", "torch_view"]

Bytes = NDArray[np.uint8]
_INTS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  #: torch has whole arithmetic for these only


def on_gpu(memory: Any) -> bool:
    """Whether bytes as `flat` returns them are a GPU's."""
    return not isinstance(memory, np.ndarray)


def device_name(tensor: Any) -> str:
    """Return "cpu" or "cuda:N" for a tensor of torch or numpy. Raises BadRange for any other device."""
    device = getattr(tensor, "device", "cpu")
    kind = getattr(device, "type", "cpu")  # numpy 2 has arrays with a device, too: the text "cpu"
    if kind == "cpu":
        return "cpu"
    if kind != "cuda":
        raise BadRange(f"a tensor on {device}: memory of the host and of CUDA devices is served: copy it to one")
    return f"cuda:{device.index or 0}"


def check_served(engine: TransferEngine, device: str, what: str) -> None:
    """Raise Unsupported naming both if memory on this device cannot be registered with the engine."""
    if device != "cpu" and device not in engine.devices:
        raise Unsupported(
            f"{what} is on {device}, the engine serves {', '.join(engine.devices)}: open it with "
            f"TransferEngine.open({device!r})"
        )


def flat(buffer: Any) -> Any:
    """Return a trainer's buffer as bytes [n], not copied. Raises BadRange for memory that is not contiguous."""
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "untyped_storage"):
        import torch

        device = device_name(buffer)
        if not buffer.is_contiguous():
            raise BadRange(
                f"a trainer's buffer of shape {tuple(buffer.shape)} on {device} is not contiguous: give a contiguous "
                "tensor, or the base that it is a view of"
            )
        if buffer.numel() == 0:
            return np.zeros(0, np.uint8)
        data = buffer.detach().reshape(-1).view(torch.uint8)
        return data.numpy() if device == "cpu" else data
    array = np.asarray(buffer)
    if not array.flags.c_contiguous:
        raise BadRange(f"a trainer's buffer of shape {array.shape} is not contiguous: give np.ascontiguousarray of it")
    return array.reshape(-1).view(np.uint8)


def bits_view(memory: Any, item: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    """Return a box of elements of `item` bytes as integers: a numpy array, or a tensor on the GPU. Strides in bytes."""
    if on_gpu(memory):
        return torch_view(memory, _INTS[item], offset, size, stride)
    bits = memory[offset:]
    bits = bits[: len(bits) // item * item].view(bits_of(item))
    return np.lib.stride_tricks.as_strided(bits, size, stride)


def torch_view(memory: Any, dtype: str, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    """Return a box of elements as a torch tensor where they lie, not copied. Offset and strides in bytes."""
    import torch

    item = itemsize_of(dtype)
    part = memory[offset:]
    part = part[: len(part) // item * item]
    part = part.view(torch_dtype(dtype)) if on_gpu(memory) else torch.frombuffer(part, dtype=torch_dtype(dtype))
    return part.as_strided(size, [step // item for step in stride])
