"""Fuzzes what core decodes: descriptors, addresses as bytes and as text (S2, C12). See README.md here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["fabric_core.wire", "fabric_core.types"]):
    from fabric_core import MrDesc, NetAddr, ProtocolError, wire

#: The first byte of an input says what it is fed to, and whether it gets a good head.
_HEADS = {0: b"", 1: b"FbD" + bytes([wire.WIRE_VERSION]), 2: b"FbA" + bytes([wire.WIRE_VERSION])}


def _again(kind: Any, data: bytes) -> None:
    try:
        value = kind.from_bytes(data)
    except ProtocolError:
        return
    assert kind.from_bytes(value.to_bytes()) == value
    repr(value)


def test_one_input(data: bytes) -> None:
    """Called by libFuzzer."""
    if not data:
        return
    how, body = data[0], data[1:]
    head = _HEADS.get(how % 4)
    if head is None:
        text = body.decode("latin-1" if how & 4 else "utf-8", "replace")
        try:
            address = NetAddr.parse(text)
        except ProtocolError:
            return
        assert NetAddr.parse(str(address)) == address
        return
    _again(MrDesc, head + body)
    _again(NetAddr, head + body)


def _seeds() -> list[bytes]:
    """Inputs that decode, for chance to start from."""
    address = NetAddr("local", ("a.0#1f", "a.1#1f"))
    desc = MrDesc(address, 4096, 1 << 20, 1, [1 << 32, (1 << 32) + 1], [4096, 0])
    return [b"\1" + desc.to_bytes()[4:], b"\2" + address.to_bytes()[4:], b"\3" + str(address).encode()]


if __name__ == "__main__":
    if len(sys.argv) > 1 and (corpus := Path(sys.argv[-1])).is_dir():
        for i, seed in enumerate(_seeds()):
            (corpus / f"seed-{i}").write_bytes(seed)
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()
