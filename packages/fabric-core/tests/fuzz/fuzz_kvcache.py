"""Fuzzes the control messages of fabric-kvcache (S2, C12). See README.md here."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fabric_kvcache.protocol", "fabric_kvcache.layout"]):
    from fabric_core import ProtocolError
    from fabric_kvcache.layout import KvLayout
    from fabric_kvcache.protocol import VERSION, KvReject, KvRequest, decode, encode, indices


def test_one_input(data: bytes) -> None:
    """Called by libFuzzer. An odd first byte: the rest gets a good head."""
    if not data:
        return
    raw = b"fkv" + bytes([VERSION]) + data[1:] if data[0] & 1 else data[1:]
    try:
        message = decode(raw)
    except ProtocolError:
        return
    assert decode(encode(message)) == message
    if isinstance(message, KvRequest):
        assert len(message.page_indices) == message.layout.pages_for(len(message.tokens))


def _seeds() -> list[bytes]:
    """Inputs that decode, for chance to start from."""
    layout = KvLayout(layers=3, kv_heads=2, head_dim=8, page_tokens=4)
    request = KvRequest(
        request_id="r1",
        layout=layout,
        reply_to=b"address",
        desc=b"descriptor",
        pool_pages=10,
        pages=indices([7, 2, 9]),
        tail_offset=4096,
        tail_bytes=100,
        imm=5,
        timeout_ms=30_000,
        prompt=indices(range(9)),
    )
    return [b"\1" + encode(message)[4:] for message in (request, KvReject("r1", "full"))]


if __name__ == "__main__":
    if len(sys.argv) > 1 and (corpus := Path(sys.argv[-1])).is_dir():
        for i, seed in enumerate(_seeds()):
            (corpus / f"seed-{i}").write_bytes(seed)
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()
