"""GPUs as the engine meets them: the driver behind `cuda:N`, what an address is, whose stream this is.

Nothing of CUDA is imported. The driver is loaded by the C part at the first need, and tensors and streams are
recognised by what they offer (`__cuda_array_interface__`, `cuda_stream`, ...).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from fabric_core.errors import BackendError, ConfigError, Unsupported
from fabric_core.native_lib import ffi, lib, text

__all__ = ["Gpu", "describe", "device_of", "gpus", "ordinal", "served", "stream_of", "told"]

_ERR_MAX = 256


class Gpu(NamedTuple):
    """A GPU that the driver offers."""

    device: str  #: "cuda:0"
    name: str
    pci: str
    memory: int  #: bytes
    multiprocessors: int
    compute: tuple[int, int]
    stream_words: bool  #: streams can write and wait for 64-bit words


def why_not() -> str:
    """Return why there is no GPU to be had here; "" if there is one."""
    err = ffi.new("char[]", _ERR_MAX)
    return "" if lib.fab_cuda_load(err, _ERR_MAX) == 0 else text(err)


def ordinal(device: str) -> int:
    """Return N of "cuda:N" ("cuda" is 0).

    Raises:
        ConfigError: another form, or no such GPU. Unsupported: no driver, or no GPU at all.
    """
    match = re.fullmatch(r"cuda(?::(\d{1,3}))?", device)
    if match is None:
        raise ConfigError(f"device={device!r}: expected 'cuda:N'")
    reason = why_not()
    if reason:
        raise Unsupported(f"device {device!r}: {reason}")
    number, count = int(match[1] or 0), lib.fab_cuda_devices()
    if number >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        raise ConfigError(f"device {device!r}: this process sees {count} GPU(s), the last is cuda:{count - 1}{seen}")
    return number


def served(devices: Sequence[str], device: str | None = None) -> int | None:
    """Return the ordinal of an engine's first GPU, or of `device` if it is among its devices; None: it is not."""
    found = (name for name in devices if name.startswith("cuda:") and device in (None, name))
    return next((int(name.partition(":")[2]) for name in found), None)


def describe(number: int) -> Gpu:
    """Return what the driver says of GPU `number`. Raises BackendError."""
    out = ffi.new("fab_cuda_device_info *")
    rc = lib.fab_cuda_describe(number, out)
    if rc < 0:
        raise BackendError(f"cuda:{number}: {os.strerror(-rc)}")
    return Gpu(
        f"cuda:{number}",
        text(out.name),
        text(out.pci).lower(),
        out.memory,
        out.multiprocessors,
        (out.compute_major, out.compute_minor),
        bool(out.stream_words),
    )


def gpus() -> list[Gpu]:
    """Return all GPUs that this process sees; [] without a driver."""
    return [describe(i) for i in range(lib.fab_cuda_devices())]


def device_of(address: int) -> str:
    """Return "cuda:N" for an address in GPU memory, else "cpu"."""
    out = ffi.new("fab_cuda_range *")
    lib.fab_cuda_what(address, out)
    return f"cuda:{out.device}" if out.device >= 0 else "cpu"


def stream_of(stream: Any) -> int:
    """Return the driver's handle of a stream of torch, CuPy or cuda.core, of None (the default one), or an address."""
    if stream is None:
        return 0
    if isinstance(stream, int):
        return stream
    for name in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, cuda.core
        found = getattr(stream, name, None)
        if found is not None:
            return int(found)
    raise ConfigError(f"a stream is one of torch, CuPy or cuda.core, an address, or None; not {type(stream).__name__}")


def told(rc: int, what: str) -> None:
    """Raise BackendError with the driver's own words if `rc` is a negative errno."""
    if rc < 0:
        words = ffi.new("char[]", _ERR_MAX)
        lib.fab_cuda_last_error(words, _ERR_MAX)
        raise BackendError(f"{what}: {text(words) or os.strerror(-rc)}")
