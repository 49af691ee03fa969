"""Element types by name: the words of safetensors and torch, their widths, and how numpy holds their bits."""

from __future__ import annotations

from typing import Any

from fabric_core import ConfigError

__all__ = ["NAMES", "bits_of", "code_of", "itemsize_of", "name_of", "torch_dtype"]

_WIDTHS = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
NAMES = tuple(_WIDTHS)  #: in the order of their codes
_CODES = {name: code for code, name in enumerate(NAMES)}


def itemsize_of(name: str) -> int:
    """Return the bytes of an element. Raises ConfigError for a name that is none."""
    try:
        return _WIDTHS[name]
    except KeyError:
        raise ConfigError(f"no element type is called {name!r}; there are {', '.join(NAMES)}") from None


def code_of(name: str) -> int:
    """Return a small number for a name. Raises ConfigError."""
    itemsize_of(name)
    return _CODES[name]


def name_of(dtype: Any) -> str:
    """Return the name of a torch or numpy dtype, e.g. "bfloat16". Raises ConfigError for one that is not known here."""
    name = str(dtype).removeprefix("torch.")
    itemsize_of(name)
    return name


def bits_of(itemsize: int) -> str:
    """Return the numpy type that holds the bits of an element of so many bytes."""
    return f"<u{itemsize}"


def torch_dtype(name: str) -> Any:
    """Return torch's dtype of that name. Raises ConfigError, also when torch is not installed."""
    itemsize_of(name)
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"changing element types needs torch, which cannot be imported: {error}") from None
    return getattr(torch, name)
