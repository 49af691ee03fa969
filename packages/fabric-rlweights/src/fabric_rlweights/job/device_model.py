"""Weights of a job on a torch device: random parameters, fp8 tables, and digests that both sides can be compared by."""

from __future__ import annotations

from typing import Any

import numpy as np

from fabric_core import ConfigError
from fabric_rlweights.digest import MASK
from fabric_rlweights.digest_torch import runs_digest
from fabric_rlweights.meta import EngineTable, Quant, Tensor, contiguous

__all__ = ["digest_of", "fill", "in_fp8", "memory_for", "reference"]

BLOCK = 128


def fill(parameters: dict[str, Any], device: str, version: int) -> None:
    """Give every parameter new random numbers, made on the device wherever the parameter lies."""
    import torch

    generator = torch.Generator(device).manual_seed(version)
    for parameter in parameters.values():
        numbers = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        parameter.copy_(numbers.normal_(generator=generator))


def in_fp8(table: EngineTable) -> EngineTable:
    """Return the table of an engine whose layers' matrices are fp8 with scales of blocks. Raises ConfigError."""
    tensors: list[Tensor] = []
    for tensor in table.tensors:
        if len(tensor.shape) != 2 or "layers." not in tensor.name:
            tensors.append(tensor)
            continue
        if any(extent % BLOCK for extent in tensor.shape):
            raise ConfigError(
                f"{tensor.name} of shape {tensor.shape} is not cut into whole blocks: take a larger model"
            )
        scales = tensor.name + "_scale_inv"
        shape = (tensor.shape[0] // BLOCK, tensor.shape[1] // BLOCK)
        changed = {"strides": contiguous(tensor.shape, 1), "dtype": "float8_e4m3fn"}
        quant = Quant(scheme="block", scales=scales)
        tensors.append(tensor.model_copy(update={**changed, "quant": quant}))
        tensors.append(Tensor(name=scales, shape=shape, strides=contiguous(shape, 4), dtype="float32"))
    return EngineTable(rank=table.rank, tensors=tuple(tensors), entries=table.entries)


def memory_for(table: EngineTable, device: str) -> tuple[EngineTable, dict[str, Any]]:
    """Return tensors for a table, all bits set, and the table with their addresses."""
    import torch

    memory, tensors = {}, []
    for tensor in table.tensors:
        dtype = getattr(torch, tensor.dtype)
        count = int(np.prod(tensor.shape)) * dtype.itemsize
        memory[tensor.name] = (
            torch.full((count,), 0xFF, dtype=torch.uint8, device=device).view(dtype).view(tensor.shape)
        )
        tensors.append(tensor.model_copy(update={"address": memory[tensor.name].data_ptr()}))
    return EngineTable(rank=table.rank, tensors=tuple(tensors), entries=table.entries), memory


def reference(x: Any) -> tuple[Any, Any]:
    """Quantise a whole matrix at once, as an engine would: (fp8, scales of blocks)."""
    import torch

    tiles = x.float().view(x.shape[0] // BLOCK, BLOCK, x.shape[1] // BLOCK, BLOCK)
    largest = tiles.abs().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
    scale = largest / torch.full_like(largest, 448.0)
    return (tiles * (torch.ones_like(scale) / scale)).to(torch.float8_e4m3fn).view(x.shape), scale[:, 0, :, 0]


def digest_of(tensor: Any) -> int:
    """Return the digest (digest.py) of a tensor's elements, in their order."""
    import torch

    whole = tensor.contiguous()
    data, item = whole.reshape(-1).view(torch.uint8), whole.element_size()
    zero = np.zeros(1, np.int64)
    return int(runs_digest(data, item, zero, zero, len(data))) & MASK
