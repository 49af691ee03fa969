"""Control messages: what is sent arrives, and whatever else arrives is an error (contract C12)."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_strategies import layouts

from fabric_core import BadRange, ProtocolError
from fabric_kvcache.cache import CacheLayout
from fabric_kvcache.protocol import (
    MAX_MESSAGE,
    MAX_REASON,
    VERSION,
    Ask,
    Cancel,
    Closed,
    Ended,
    Goodbye,
    Hello,
    Message,
    Unwelcome,
    Welcome,
    decode,
    encode,
    indices,
)
from fabric_kvcache.request import Assembly, asks, body_of

numbers = st.integers(0, 2**63 - 1)
blobs = st.binary(min_size=1, max_size=50)
reasons = st.text(st.characters(exclude_categories=["Cs"]), max_size=MAX_REASON)


def make(**changes: Any) -> Ask:
    fields: dict[str, Any] = {
        "session": 1,
        "epoch": 2,
        "request_id": "r1",
        "reply_to": b"address",
        "seed": 3,
        "start": 0,
        "total": 9,
        "prompt": True,
        "tables": (3,),
        "tail": True,
        "tail_offset": 4096,
        "seal_offset": 0,
        "imm": 5,
        "seal_imm": 6,
        "timeout_ms": 30_000,
        "offset": 0,
        "data": bytes(48),
    }
    return Ask(**{**fields, **changes})


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layouts(), numbers, numbers, blobs)
def test_a_handshake_arrives_as_it_was_sent(layout: CacheLayout, nonce: int, session: int, blob: bytes) -> None:
    """Any layout goes through, as it is."""
    pages = (7,) * len(layout.groups)
    for message in (
        Hello(nonce, session, blob, layout, 0, 0, pages, (), blob, blob, 100, "i"),
        Welcome(nonce, session, blob, layout, 0, 0),
    ):
        assert decode(encode(message)) == message


@settings(deadline=None)
@given(numbers, numbers, reasons)
def test_answers_arrive_as_they_were_sent(nonce: int, epoch: int, reason: str) -> None:
    for message in (
        Unwelcome(nonce, reason),
        Ended(nonce, epoch, "failed", reason),
        Cancel(nonce, epoch, b"to"),
        Goodbye(nonce),
        Closed(nonce, reason),
    ):
        assert decode(encode(message)) == message


@settings(deadline=None)
@given(
    st.integers(1, 5000), st.booleans(), st.lists(st.integers(0, 400), max_size=3), st.integers(600, 4000), st.randoms()
)
def test_a_request_in_parts_is_put_together_in_any_order(
    total: int, prompt: bool, lengths: list[int], room: int, random: Any
) -> None:
    """However long it is and however small a message: the prompt and the tables come out as they went in."""
    rng = np.random.default_rng(total)
    tokens = rng.integers(0, 2**32, total * prompt, dtype=np.uint32)
    tables = tuple(rng.integers(0, 2**32, n, dtype=np.uint32) for n in lengths)
    body = body_of(tokens, tables)
    head = make(total=total, prompt=prompt, tables=tuple(lengths), data=body[:4])
    parts = list(asks(head, body, room))
    sent = [encode(part) for part in parts]
    assert all(len(data) <= room for data in sent)
    random.shuffle(sent)
    sent.insert(random.randrange(len(sent)), sent[0])  # a message that came twice changes nothing
    arrived = [decode(data) for data in sent]
    first = arrived[0]
    assert isinstance(first, Ask)
    assembly = Assembly(first)
    whole = [assembly.add(part) for part in arrived if isinstance(part, Ask)]
    assert whole[-1]
    got = assembly.request()
    assert np.array_equal(got.tokens, tokens)
    assert [table.tolist() for table in got.tables] == [table.tolist() for table in tables]


def test_parts_that_contradict_each_other_are_refused() -> None:
    parts = list(asks(make(data=bytes(4)), bytes(48), 560))
    assert len(parts) > 1
    assembly = Assembly(parts[0])
    assert not assembly.add(parts[0])
    with pytest.raises(ProtocolError, match="contradict"):
        assembly.add(msgspec.structs.replace(parts[1], imm=7))
    with pytest.raises(ProtocolError, match="overlap"):
        assembly.add(msgspec.structs.replace(parts[0], data=parts[0].data[:-4]))
    shifted = msgspec.structs.replace(parts[1], offset=parts[1].offset - 4, data=bytes(48 - parts[1].offset + 4))
    with pytest.raises(ProtocolError, match="overlap"):
        assembly.add(shifted)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_give_a_protocol_error(data: bytes) -> None:
    for candidate in (data, b"fkv" + data, b"fkv" + bytes([VERSION]) + data):
        with pytest.raises(ProtocolError):
            decode(candidate)


@settings(max_examples=300, deadline=None)
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
        assert isinstance(got, get_args(Message))
        if isinstance(got, Ask):
            assert 0 <= got.start < got.total
            assert got.offset + len(got.data) <= got.body_bytes
            assert 0 <= got.imm < 1 << 29


@settings(deadline=None)
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
        ({"start": 9}, "start=9 of 9"),
        ({"data": bytes(52)}, "of a body of 48"),
        ({"data": b""}, "of a body of 48"),
        ({"data": bytes(47)}, "whole numbers"),
        ({"tables": (1 << 62,)}, "at most"),
    ],
    ids=str,
)
def test_a_request_that_contradicts_itself_cannot_be_made(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"imm": 1 << 29},
        {"seal_imm": -1},
        {"timeout_ms": 0},
        {"request_id": ""},
        {"request_id": "x" * 129},
        {"reply_to": b""},
        {"reply_to": bytes(5000)},
        {"epoch": -1},
        {"total": 1 << 23, "tables": (), "prompt": False, "data": b""},
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
