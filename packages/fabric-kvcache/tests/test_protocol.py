"""Control messages: what is sent arrives, and whatever else arrives is an error (contract C12)."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_core import BadRange, ProtocolError
from fabric_kvcache.layout import KvLayout
from fabric_kvcache.protocol import MAX_MESSAGE, MAX_REASON, VERSION, KvReject, KvRequest, decode, encode, indices

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=8, page_tokens=4)


def make(**changes: Any) -> KvRequest:
    fields: dict[str, Any] = {
        "request_id": "r1",
        "layout": LAYOUT,
        "reply_to": b"address",
        "desc": b"descriptor",
        "pool_pages": 10,
        "pages": indices([7, 2, 9]),
        "tail_offset": 4096,
        "tail_bytes": 100,
        "imm": 5,
        "timeout_ms": 30_000,
        "prompt": indices(range(9)),
    }
    return KvRequest(**{**fields, **changes})


def test_a_request_arrives_as_it_was_sent() -> None:
    request = make()
    got = decode(encode(request))
    assert isinstance(got, KvRequest)
    assert got == request
    assert got.tokens.tolist() == list(range(9))
    assert got.page_indices.tolist() == [7, 2, 9]
    assert got.writes == 3 * 3 + 1


@given(st.text(max_size=MAX_REASON), st.text(min_size=1, max_size=64))
def test_a_refusal_arrives_as_it_was_sent(reason: str, request_id: str) -> None:
    try:
        data = encode(KvReject(request_id, reason))
    except (ProtocolError, UnicodeEncodeError):
        assert any("\ud800" <= char <= "\udfff" for char in reason + request_id), "only half a character cannot travel"
        return
    assert decode(data) == KvReject(request_id, reason)


@given(st.binary(max_size=300))
def test_any_bytes_give_a_protocol_error(data: bytes) -> None:
    for candidate in (data, b"fkv" + data, b"fkv" + bytes([VERSION]) + data):
        with pytest.raises(ProtocolError):
            decode(candidate)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_request_is_an_error_or_consistent_in_itself(data: Any) -> None:
    good = bytearray(encode(make()))
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(good) - 1))
        good[where] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    for candidate in (bytes(good), bytes(good[:cut]), bytes(good) + b"\0"):
        try:
            got = decode(candidate)
        except ProtocolError:
            continue
        if isinstance(got, KvRequest):
            pages = got.page_indices.tolist()
            assert len(set(pages)) == len(pages) == got.layout.pages_for(len(got.tokens))
            assert max(pages) < got.pool_pages
            assert 0 <= got.imm < 1 << 29


@given(st.recursive(st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary() | st.text(), st.lists, max_leaves=30))
def test_any_msgpack_object_that_is_no_message_gives_a_protocol_error(value: Any) -> None:
    try:
        body = msgspec.msgpack.encode(value)
    except UnicodeEncodeError:
        return
    with pytest.raises(ProtocolError):
        decode(b"fkv" + bytes([VERSION]) + body)


def test_deep_nesting_gives_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        decode(b"fkv" + bytes([VERSION]) + b"\x91" * 100_000)


def test_another_version_is_named() -> None:
    data = bytearray(encode(make()))
    data[3] = VERSION + 1
    with pytest.raises(ProtocolError, match=f"version {VERSION + 1} .* version {VERSION}"):
        decode(bytes(data))


def test_a_message_that_is_too_long_is_not_even_parsed() -> None:
    with pytest.raises(ProtocolError, match=str(MAX_MESSAGE)):
        decode(bytes(MAX_MESSAGE + 1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pages": indices([1, 2])}, "2 pages for 9 tokens, 3"),
        ({"pages": indices([1, 2, 10])}, "page 10 of a pool of 10"),
        ({"pages": indices([1, 2, 1])}, "named twice"),
        ({"pages": indices([1, 2, 3])[:-1]}, "cut off"),
        ({"prompt": indices(range(9))[:-2]}, "cut off"),
        ({"prompt": b"", "pages": b""}, "without a token"),
    ],
)
def test_a_request_that_contradicts_itself_cannot_be_made(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"imm": 1 << 29},
        {"imm": -1},
        {"timeout_ms": 0},
        {"request_id": ""},
        {"request_id": "x" * 65},
        {"reply_to": b""},
        {"desc": bytes(5000)},
        {"tail_bytes": 1 << 31},
        {"pool_pages": 1 << 25},
    ],
    ids=str,
)
def test_a_request_out_of_bounds_is_not_sent(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        encode(make(**changes))


@pytest.mark.parametrize("values", [[-1], [1 << 32], [0.5], ["a"], np.array([3, -1])], ids=repr)
def test_only_numbers_of_32_bits_travel(values: Any) -> None:
    with pytest.raises(BadRange, match="integers from 0"):
        indices(values)
