"""Control messages between a decoder rank and a prefill rank: what is sent by SEND, and nothing else.

A message is a 4-byte head (`fkv` and a version byte) and one msgpack object. Every size has a bound, and everything
that can be checked without a peer is checked while decoding. Bytes that are not a message raise ProtocolError, whatever
they are.

    decoder rank                               prefill rank
       | -- Hello ---------------------------------> |   once per pair: what my memory looks like
       | <------------------ Welcome, or Unwelcome --|   and who I am; or why this pair cannot work
       | -- Ask, in as many parts as it takes -----> |
       | <------------ pages, per layer (WRITEIMM) --|   in any order, each raises the data immediate once
       | <--------------------- tail (WRITEIMM) -----|   so does the tail
       | <--------------------- seal (WRITEIMM) -----|   raises the seal immediate: how many of those there are
       | -- Cancel --------------------------------> |   at any time, any number of times
       | <--------------------------------- Ended ---|   never before every write of the request has ended
       | -- Goodbye -------------------------------> |   this decoder is closed: forget the session
       | <-------------------------------- Closed ---|   this prefiller is: of the session nothing is under way any more

The seal is what makes the count exact whatever the prefiller merged; `Ended` is what makes pages safe to use again.
Messages have no order: a Cancel may overtake its Ask, which then must not be served (see sessions.py).
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from fabric_core import BadRange, ProtocolError
from fabric_kvcache.cache import CacheLayout

__all__ = [
    "MAX_MESSAGE",
    "MAX_PAGES",
    "MAX_REASON",
    "MAX_TOKENS",
    "SEAL",
    "VERSION",
    "Ask",
    "Cancel",
    "Closed",
    "Ended",
    "Goodbye",
    "Hello",
    "Message",
    "Unwelcome",
    "Welcome",
    "decode",
    "encode",
    "greeting_of_another_version",
    "indices",
    "unwelcome_in_version",
]

VERSION = 3
_MAGIC = b"fkv"

MAX_TOKENS = 1 << 22  #: of one prompt
MAX_PAGES = 1 << 22  #: of one request, all block tables together
MAX_POOL_PAGES = 1 << 32  #: of one group's pool
MAX_BODY = 4 * (MAX_TOKENS + MAX_PAGES)  #: bytes of a request's prompt and block tables
MAX_BLOB = 4096  #: bytes of an encoded address or descriptor
MAX_REASON = 1000  #: characters of a refusal
MAX_MESSAGE = 1 << 20  #: bytes of any message; a backend may carry less
MAX_TIMEOUT_MS = 24 * 3600 * 1000

#: What a seal holds: the request's epoch, how many writes raise the data immediate, and how many bytes they have.
SEAL = struct.Struct("<QQQ")

_U32 = np.dtype("<u4")
_U63 = (1 << 63) - 1
_Number = Annotated[int, msgspec.Meta(ge=0, le=_U63)]
_Blob = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_BLOB)]
_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
_Imm = Annotated[int, msgspec.Meta(ge=0, lt=1 << 29)]
_PerGroup = Annotated[tuple[_Number, ...], msgspec.Meta(max_length=64)]
_Timeout = Annotated[int, msgspec.Meta(ge=1, le=MAX_TIMEOUT_MS)]


def indices(values: Any) -> bytes:
    """Encode a sequence of numbers as they travel: little-endian u32. Raises BadRange for one that is none."""
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or int(array.min()) < 0 or int(array.max()) >= 1 << 32):
        raise BadRange("token ids and page numbers are integers from 0 to 2**32 - 1")
    return array.astype(_U32).tobytes()


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="hello"):
    """Decoder to prefiller, once: who I am, what my pools look like, and how to write there."""

    nonce: _Number  #: comes back in the answer
    decoder: _Number  #: one `Decoder` object: its next Hello replaces this one
    reply_to: _Blob  #: NetAddr
    layout: CacheLayout
    tp: _Number
    pp: _Number
    pages: _PerGroup  #: of each group's pool
    bases: _PerGroup  #: where each pool begins in the memory of `desc`; (): one behind another
    desc: _Blob  #: MrDesc of the memory with the pools
    slots: _Blob  #: MrDesc of the memory with seals and tails
    tail_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
    instance: Annotated[
        str, msgspec.Meta(max_length=128)
    ]  #: the same at all ranks of a decode instance, and only there

    def __post_init__(self) -> None:
        if len(self.pages) != len(self.layout.groups) or len(self.bases) not in {0, len(self.pages)}:
            raise ValueError(
                f"{len(self.pages)} pools and {len(self.bases)} bases for {len(self.layout.groups)} groups"
            )


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="welcome"):
    """Prefiller to decoder: ask me, under this session."""

    nonce: _Number
    session: _Number
    address: _Blob  #: NetAddr with the incarnation
    layout: CacheLayout
    tp: _Number
    pp: _Number


class Unwelcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="unwelcome"):
    """Prefiller to decoder: this pair cannot work."""

    nonce: _Number
    reason: _Reason


class Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="ask"):
    """Decoder to prefiller: compute this prompt, and write its KV there. One part of it; each has all but the body.

    The body is the prompt's token ids, if they travel, and then one block table per group of the decoder's layout.
    """

    session: _Number
    epoch: _Number  #: names this attempt, among all of the decoder's
    request_id: _Id  #: the same at all decoder ranks of a request
    reply_to: _Blob  #: NetAddr
    seed: _Number  #: decides between replicas; the same at all ranks of a request
    start: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TOKENS)]  #: tokens that the decoder has already
    total: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    prompt: bool  #: whether the body begins with `total` token ids
    tables: _PerGroup  #: length of each block table
    tail: bool  #: whether this prefill rank is the one that sends the tail
    tail_offset: _Number  #: in the memory of the session's `slots`
    seal_offset: _Number
    imm: _Imm
    seal_imm: _Imm
    timeout_ms: _Timeout  #: of the whole request, from its arrival on
    offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_BODY)]  #: of `data` in the body
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE)]

    def __post_init__(self) -> None:
        if self.start >= self.total:
            raise ValueError(f"start={self.start} of {self.total} tokens: at least the last one is to be computed")
        if self.body_bytes > MAX_BODY or len(self.data) % 4 or self.offset % 4:
            raise ValueError(f"a body of {self.body_bytes} bytes, at most {MAX_BODY} in pieces of whole numbers")
        if self.offset + len(self.data) > self.body_bytes or (self.body_bytes and not self.data):
            raise ValueError(f"bytes {self.offset} to {self.offset + len(self.data)} of a body of {self.body_bytes}")

    @property
    def body_bytes(self) -> int:
        return 4 * (self.total * self.prompt + sum(self.tables))


class Cancel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="cancel"):
    """Decoder to prefiller: stop writing for that request, and answer `Ended` when nothing is under way any more."""

    session: _Number
    epoch: _Number
    reply_to: _Blob  #: NetAddr


class Ended(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="ended"):
    """Prefiller to decoder: of that request no write is under way any more, and none will follow."""

    session: _Number
    epoch: _Number
    how: Literal["refused", "failed", "cancelled", "forgotten"]  #: forgotten: greet me again
    reason: _Reason


class Goodbye(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="goodbye"):
    """Decoder to prefiller: this decoder is closed, its session may be forgotten."""

    session: _Number


class Closed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="closed"):
    """Prefiller to decoder: this prefiller is closed; of the session no write is under way, and none will follow."""

    session: _Number
    reason: _Reason


Message = Hello | Welcome | Unwelcome | Ask | Cancel | Ended | Goodbye | Closed

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the bytes of a message. Raises ProtocolError if the peer would refuse them."""
    try:
        data = _MAGIC + bytes([VERSION]) + _encoder.encode(message)
        decode(data)
    except (ProtocolError, msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a message that no peer would take: {error}") from None
    return data


def decode(data: bytes) -> Message:
    """Return the message in these bytes. Raises ProtocolError, and nothing else, for anything that is not one."""
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"a control message of {len(data)} bytes, at most {MAX_MESSAGE} are allowed")
    if len(data) < 4 or data[:3] != _MAGIC:
        raise ProtocolError(f"not a control message of fabric-kvcache ({len(data)} bytes)")
    if data[3] != VERSION:
        raise ProtocolError(
            f"the peer speaks version {data[3]} of the KV protocol, this side version {VERSION}; "
            "install the same fabric-kvcache on both"
        )
    try:
        message: Message = _decoder.decode(memoryview(data)[4:])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a malformed control message: {error}") from None
    return message


def greeting_of_another_version(data: bytes) -> tuple[int, int, bytes] | None:
    """Return (version, nonce, reply_to) if these bytes are the `Hello` of another version, else None.

    The head of a message, the first fields of `Hello`, and `Unwelcome` are the same in every version.
    """
    if not 4 < len(data) <= MAX_MESSAGE or data[:3] != _MAGIC or data[3] == VERSION:
        return None
    try:
        fields = msgspec.msgpack.decode(memoryview(data)[4:])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    match fields:
        case ["hello", int(nonce), _, bytes(reply_to), *_] if 0 <= nonce <= _U63:
            return data[3], nonce, reply_to
    return None


def unwelcome_in_version(version: int, nonce: int) -> bytes:
    """Return the answer to the `Hello` of another version, so that it understands it."""
    reason = (
        f"the decoder speaks version {version} of the KV protocol, the prefiller version {VERSION}; "
        "install the same fabric-kvcache on both"
    )
    return _MAGIC + bytes([version]) + _encoder.encode(Unwelcome(nonce, reason))
