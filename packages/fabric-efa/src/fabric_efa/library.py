"""The compiled module and libfabric behind it, each with a plain reason when it is not there."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from fabric_core.errors import BackendError
from fabric_efa.options import Options

__all__ = ["Missing", "Nic", "load", "offers", "versions", "words"]

_ERR_MAX = 512
_OFFERS = 64


class Missing(BackendError):
    """Something that must be installed first; `cure` says what."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(f"{reason}; {cure}")
        self.reason = reason
        self.cure = cure


@dataclass(frozen=True)
class Nic:
    """One endpoint that a provider offers, in libfabric's words."""

    provider: str
    domain: str
    source: str  #: address it would be bound to, "" where the provider has no choice
    pci: str
    bits_per_s: int  #: 0: unknown
    mtu: int  #: bytes, 0: unknown
    state: str  #: "up", "down", or "" for unknown
    max_msg: int  #: bytes
    cq_data: int  #: bytes of an immediate


@functools.cache
def _module() -> tuple[Any, Any]:
    try:
        from fabric_efa._native import ffi, lib
    except ImportError as error:
        text = "built without libfabric's headers, or for another Python" if "_native" in str(error) else str(error)
        raise Missing(text, cure="install libfabric-dev (or the EFA installer) and reinstall fabric-efa") from error
    return ffi, lib


def text(ffi: Any, buffer: Any) -> str:
    """Return a C string as str, whatever bytes it holds."""
    return bytes(ffi.string(buffer)).decode(errors="replace")


def load(options: Options) -> tuple[Any, Any]:
    """Return (ffi, lib) with libfabric loaded. Raises BackendError with what is missing."""
    ffi, lib = _module()
    err = ffi.new("char[]", _ERR_MAX)
    path = options.library.encode() if options.library else ffi.NULL
    if lib.fab_efa_load(path, err, _ERR_MAX) < 0:
        cure = "install libfabric1 (Debian, Ubuntu), libfabric (Fedora) or the EFA installer; FABRIC_EFA_LIBRARY=path"
        raise Missing(f"libfabric cannot be used: {text(ffi, err)}", cure=cure)
    return ffi, lib


def versions(options: Options) -> tuple[str, str]:
    """Return libfabric's version and the API version asked of it. Raises BackendError."""
    _ffi, lib = load(options)
    return _dotted(lib.fab_efa_version()), _dotted(lib.fab_efa_api())


def _dotted(version: int) -> str:
    return f"{version >> 16}.{version & 0xFFFF}"


def offers(options: Options, provider: str, source: str = "") -> list[Nic]:
    """Return what a provider offers, bound to the address `source` if one is given; [] if it is not there."""
    ffi, lib = load(options)
    out = ffi.new("fab_efa_nic[]", _OFFERS)
    count = lib.fab_efa_probe(provider.encode(), source.encode() if source else ffi.NULL, out, _OFFERS)
    if count < 0:
        return []
    found = []
    for nic in out[0 : min(count, _OFFERS)]:
        found.append(
            Nic(
                provider=text(ffi, nic.provider),
                domain=text(ffi, nic.domain),
                source=text(ffi, nic.source),
                pci=text(ffi, nic.pci),
                bits_per_s=nic.speed,
                mtu=nic.mtu,
                state={1: "down", 2: "up"}.get(nic.up, ""),
                max_msg=nic.max_msg,
                cq_data=nic.cq_data,
            )
        )
    return found


def words(nic: str = "", peer: str = "", status: int = 0) -> str:
    """Return what a NIC's provider last said of such an error with that peer; "" if it said nothing.

    `nic` and `peer` are addresses as text, `status` is a negative errno; an empty one stands for all.
    """
    ffi, lib = _module()
    buffer = ffi.new("char[]", _ERR_MAX)
    lib.fab_efa_words(nic.encode(), peer.encode(), status, buffer, _ERR_MAX)
    return text(ffi, buffer)
