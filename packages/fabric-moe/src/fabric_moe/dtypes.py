"""Numbers as they lie in memory: bytes of any array or tensor, and float32 (float64) made from them and back.

numpy has no bfloat16, so its bits travel as uint16. torch is never imported here: a tensor is known by its methods.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange, ConfigError

__all__ = [
    "BITS",
    "FLOATS",
    "Bytes",
    "as_rows",
    "bits_of",
    "check_float",
    "check_type",
    "flat",
    "is_torch",
    "narrow",
    "to_torch",
    "torch_dtype",
    "type_name",
    "widen",
]

Bytes = NDArray[np.uint8]

#: Bits of one element of a token, by the name of its type.
BITS = {
    "float64": 64,
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int8": 8,
    "uint8": 8,
    "float4_e2m1": 4,
}

#: Types that sums are made of and carried in, with the numpy type of their bits.
FLOATS: dict[str, type[np.generic]] = {
    "bfloat16": np.uint16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
}

_NAN_BF16 = np.uint16(0x7FC0)


def bits_of(name: str) -> int:
    """Return the bits of one element. Raises ConfigError for a type that has no name here."""
    if name not in BITS:
        raise ConfigError(f"dtype={name!r}: no such element type; there are {', '.join(BITS)}")
    return BITS[name]


def check_float(field: str, name: str) -> str:
    """Return `name` if sums can be carried in it. Raises ConfigError, which names the field."""
    if name not in FLOATS:
        raise ConfigError(f"{field}={name!r}: sums are carried in {', '.join(FLOATS)}")
    return name


def is_torch(x: Any) -> bool:
    """Whether it is a torch tensor, by its methods."""
    return hasattr(x, "data_ptr") and hasattr(x, "is_contiguous")


def type_name(x: Any) -> str:
    """Return the name of an array's or tensor's element type, as it is called here."""
    return str(x.dtype).removeprefix("torch.") if is_torch(x) else str(np.dtype(x.dtype).name)


def check_type(x: Any, name: str, what: str) -> None:
    """Raise BadRange if the numbers of `x` are of another type than `name`.

    Bytes are taken for anything, and so are integers as wide as the type, for its bits: numpy has no bfloat16.
    """
    found = type_name(x)
    if name == "uint8" or found in (name, "uint8", "float4_e2m1fn_x2" if name == "float4_e2m1" else name):
        return
    width = int(x.element_size() if is_torch(x) else x.dtype.itemsize)
    if found.startswith(("int", "uint", "void")) and width * 8 == bits_of(name) and name != "int8":
        return
    raise BadRange(f"{what} is of {found}: {name} is wanted, or its bits as integers or bytes; convert it")


def flat(x: Any, what: str) -> Any:
    """Return an array or tensor with one row for each token: what is behind the first axis side by side.

    Raises BadRange for what is neither. Works without rows too, where -1 as a size does not.
    """
    if not hasattr(x, "shape"):
        raise BadRange(f"{what} is a {type(x).__name__}: a torch tensor or a numpy array is wanted")
    return x.reshape(x.shape[0], math.prod(x.shape[1:])) if len(x.shape) > 2 else x


def torch_dtype(name: str) -> Any:
    """Return torch's type of that name; float4 is two to a byte, so uint8."""
    import torch

    return torch.uint8 if name == "float4_e2m1" else getattr(torch, name)


def to_torch(rows: Bytes, name: str) -> Any:
    """Return rows of bytes as a torch tensor [rows, elements] over the same memory."""
    import torch

    if not rows.size:  # torch does not reinterpret a tensor without elements
        wide = rows.shape[1] * 8 // max(8, BITS[name])
        return torch.empty((rows.shape[0], wide), dtype=torch_dtype(name))
    return torch.from_numpy(rows).view(torch_dtype(name))


def as_rows(x: Any, row_bytes: int, what: str, kind: str | None = None) -> Bytes:
    """Return the bytes of a two-dimensional array or CPU tensor as uint8 [rows, row_bytes]; copied only if strided.

    Raises BadRange if it is no matrix, not in host memory, its rows have another size, or its numbers another type than
    `kind` (None: any).
    """
    if is_torch(x):
        if str(x.device) != "cpu":
            raise BadRange(f"{what} is on {x.device}: this release moves host memory; give a CPU tensor")
        x = x.detach().contiguous()
        if x.dim() != 2:
            raise BadRange(f"{what} has shape {tuple(x.shape)}: one row for each token is wanted")
        got = int(x.shape[1]) * int(x.element_size())
        if got != row_bytes:
            raise BadRange(f"{what} has rows of {got} bytes ({x.dtype}), {row_bytes} are configured")
        if kind is not None:
            check_type(x, kind, what)
        import torch

        rows: Bytes = x.view(torch.uint8).numpy() if x.numel() else np.zeros((int(x.shape[0]), row_bytes), np.uint8)
        return rows
    array = np.ascontiguousarray(x)
    if array.ndim != 2:
        raise BadRange(f"{what} has shape {array.shape}: one row for each token is wanted")
    got = array.shape[1] * array.itemsize
    if got != row_bytes:
        raise BadRange(f"{what} has rows of {got} bytes ({array.dtype}), {row_bytes} are configured")
    if kind is not None:
        check_type(array, kind, what)
    return array.view(np.uint8).reshape(array.shape[0], row_bytes)


def widen(rows: Bytes, name: str) -> NDArray[Any]:
    """Return the numbers in rows of bytes as float32; float64 stays as it is."""
    if name == "bfloat16":
        return (rows.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    found = rows.view(FLOATS[name])
    return found if name in ("float32", "float64") else found.astype(np.float32)


def narrow(sums: NDArray[Any], name: str) -> Bytes:
    """Return sums (float32 or float64, [rows, n]) rounded to nearest even, as rows of bytes."""
    if name == "bfloat16":
        bits = np.ascontiguousarray(sums, np.float32).view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        short = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
        short[np.isnan(sums)] = _NAN_BF16  # adding to the bits of a NaN may carry into another number
        return short.view(np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(sums.astype(FLOATS[name], copy=False)).view(np.uint8)
