"""The compiled module and libibverbs behind it, each with a plain reason when it is not there."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from fabric_core.errors import BackendError
from fabric_ibverbs.options import Options

__all__ = ["Limits", "Missing", "limits", "load", "optional", "text"]

_ERR_MAX = 512
_OPTIONAL = {"relaxed ordering": "ibv_reg_mr_iova2", "dma-buf": "ibv_reg_dmabuf_mr"}


class Missing(BackendError):
    """Something that must be installed first."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(f"{reason}; {cure}")
        self.reason = reason
        self.cure = cure


@dataclass(frozen=True)
class Limits:
    """What a device says of itself through the library."""

    max_qp: int
    max_qp_wr: int
    max_cqe: int
    max_srq_wr: int
    max_message: int  #: bytes
    firmware: str


@functools.cache
def _module() -> tuple[Any, Any]:
    try:
        from fabric_ibverbs._native import ffi, lib
    except ImportError as error:
        reason = "built without libibverbs's headers, or for another Python" if "_native" in str(error) else str(error)
        raise Missing(reason, "install libibverbs-dev (rdma-core-devel) and reinstall fabric-ibverbs") from error
    return ffi, lib


def text(ffi: Any, buffer: Any) -> str:
    """Return a C string as str, whatever bytes it holds."""
    return bytes(ffi.string(buffer)).decode(errors="replace")


def load(options: Options) -> tuple[Any, Any]:
    """Return (ffi, lib) with libibverbs loaded. Raises BackendError with what is missing."""
    ffi, lib = _module()
    err = ffi.new("char[]", _ERR_MAX)
    path = options.library.encode() if options.library else ffi.NULL
    if lib.fab_verbs_load(path, err, _ERR_MAX) < 0:
        raise Missing(
            f"libibverbs cannot be used: {text(ffi, err)}",
            "install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or rdma-core; FABRIC_VERBS_LIBRARY=path",
        )
    return ffi, lib


def optional(options: Options) -> tuple[str, ...]:
    """Return which optional abilities the loaded library has: "relaxed ordering", "dma-buf". Raises BackendError."""
    _ffi, lib = load(options)
    return tuple(name for name, symbol in _OPTIONAL.items() if lib.fab_verbs_has(symbol.encode()))


def limits(options: Options, device: str) -> Limits | str:
    """Open a device for a moment and ask it. Returns the reason as text if that is not possible. Raises Missing."""
    ffi, lib = load(options)
    err = ffi.new("char[]", _ERR_MAX)
    out = ffi.new("fab_verbs_device *")
    if lib.fab_verbs_query(device.encode(), out, err, _ERR_MAX) < 0:
        return text(ffi, err)
    return Limits(out.max_qp, out.max_qp_wr, out.max_cqe, out.max_srq_wr, out.max_msg, text(ffi, out.firmware))
