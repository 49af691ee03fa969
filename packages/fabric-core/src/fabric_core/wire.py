"""What travels between processes as bytes: addresses and descriptors. Nothing else in core encodes or decodes.

A record is a magic word, a version, and a msgpack array decoded strictly into a typed struct. Input is capped before it
is looked at, every field is checked, and anything wrong is a ProtocolError (C12). No pickle.
"""

from __future__ import annotations

import functools
from typing import Any

from fabric_core.errors import ProtocolError

__all__ = ["ADDR_MAX", "DESC_MAX", "MAX_DOMAINS", "WIRE_VERSION", "decode", "encode"]

WIRE_VERSION = 1
MAX_DOMAINS = 8
ADDR_MAX = 4096  # bytes of an encoded address
DESC_MAX = 8192  # ... and descriptor
_MAGIC = {"addr": b"FbA", "desc": b"FbD"}
_LIMIT = {"addr": ADDR_MAX, "desc": DESC_MAX}


@functools.cache
def _codec(kind: str) -> tuple[Any, Any]:
    import msgspec  # here, so that `import fabric_core` stays quick

    addr, desc = tuple[str, list[str]], tuple[str, list[str], int, int, int, list[int], list[int]]
    record: Any = addr if kind == "addr" else desc
    return msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(record, strict=True)


def encode(kind: str, record: tuple[Any, ...]) -> bytes:
    """Return the bytes of a record: "addr" (backend, domains) or "desc" (..., base, length, access, keys, bases)."""
    encoder, _ = _codec(kind)
    data: bytes = _MAGIC[kind] + bytes([WIRE_VERSION]) + encoder.encode(record)
    if len(data) > _LIMIT[kind]:
        raise ProtocolError(f"an encoded {kind} has at most {_LIMIT[kind]} bytes, this one would have {len(data)}")
    return data


def decode(kind: str, data: Any) -> Any:
    """Return the record's fields. Raises ProtocolError for anything that `encode` would not have written."""
    import msgspec

    try:
        raw = bytes(memoryview(data))
    except TypeError:
        raise ProtocolError(f"expected the bytes of an encoded {kind}, got {type(data).__name__}") from None
    if len(raw) > _LIMIT[kind]:
        raise ProtocolError(f"{len(raw)} bytes are too many for an encoded {kind} (at most {_LIMIT[kind]})")
    magic = _MAGIC[kind]
    if raw[: len(magic)] != magic:
        raise ProtocolError(f"these {len(raw)} bytes are no encoded {kind}: they begin with {raw[:3]!r}, not {magic!r}")
    if len(raw) == len(magic) or raw[len(magic)] != WIRE_VERSION:
        version = raw[len(magic)] if len(raw) > len(magic) else "none"
        raise ProtocolError(f"wire version {version} is not understood here (this release speaks {WIRE_VERSION})")
    _, decoder = _codec(kind)
    try:
        return decoder.decode(raw[len(magic) + 1 :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"damaged {kind} of {len(raw)} bytes: {error}") from None
