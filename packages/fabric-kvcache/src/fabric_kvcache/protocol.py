"""Control messages between decoder and prefiller: what is sent by SEND, and nothing else.

A message is a 4-byte head (`fkv` and a version byte) and one msgpack object, `KvRequest` or `KvReject`. Every size has
a bound, and everything that can be checked without a peer is checked while decoding: what `decode` returns is
consistent in itself. Bytes that are not a message raise ProtocolError, whatever they are.

    decoder                                  prefiller
       | -- KvRequest (SEND) ------------------> |
       | <------------- pages x layers (WRITEIMM) |   each page raises the immediate once, in any order
       | <------------------------ tail (WRITEIMM)|   so does the tail: pages x layers + 1 in all
       | <------- or: KvReject (SEND) ------------|   never before every write of the request has ended

The last line is what makes a refusal safe: after it, nothing can land in the pages any more.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange, ProtocolError
from fabric_kvcache.layout import KvLayout

__all__ = ["MAX_MESSAGE", "MAX_TOKENS", "VERSION", "KvReject", "KvRequest", "decode", "encode", "indices"]

VERSION = 1
_MAGIC = b"fkv"

MAX_TOKENS = 1 << 20  #: of one prompt
MAX_PAGES = 1 << 20  #: of one request, per layer
MAX_POOL_PAGES = 1 << 24  #: of one pool, per layer
MAX_BLOB = 4096  #: bytes of an encoded address or descriptor
MAX_REASON = 1000  #: characters of a refusal
MAX_MESSAGE = 4 * (MAX_TOKENS + MAX_PAGES) + 4 * MAX_BLOB  #: bytes of any message
MAX_TIMEOUT_MS = 24 * 3600 * 1000

_Blob = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_BLOB)]
_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_U32 = np.dtype("<u4")


def indices(values: Any) -> bytes:
    """Encode a sequence of numbers as they travel: little-endian u32. Raises BadRange for one that is none."""
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or int(array.min()) < 0 or int(array.max()) >= 1 << 32):
        raise BadRange("token ids and page numbers are integers from 0 to 2**32 - 1")
    return array.astype(_U32).tobytes()


class KvRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="request"):
    """Decoder to prefiller: compute this prompt, and write its KV there."""

    request_id: _Id
    layout: KvLayout
    reply_to: _Blob  #: NetAddr of the decoder
    desc: _Blob  #: MrDesc of the decoder's pool
    pool_pages: Annotated[int, msgspec.Meta(ge=1, le=MAX_POOL_PAGES)]  #: of each layer, in the whole pool
    pages: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_PAGES)]  #: where the prompt's pages go, in order
    tail_offset: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  #: in the memory of `desc`
    tail_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]  #: the tail's exact size
    imm: Annotated[int, msgspec.Meta(ge=0, lt=1 << 29)]  #: raised once by every page and by the tail
    timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=MAX_TIMEOUT_MS)]  #: of the whole request, from its arrival on
    prompt: Annotated[bytes, msgspec.Meta(min_length=4, max_length=4 * MAX_TOKENS)]  #: token ids

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt without a token")
        if len(self.prompt) % 4 or len(self.pages) % 4:
            raise ValueError("a list of numbers is cut off")
        wanted = self.layout.pages_for(len(self.prompt) // 4)
        if len(self.pages) // 4 != wanted:
            raise ValueError(f"{len(self.pages) // 4} pages for {len(self.prompt) // 4} tokens, {wanted} are needed")
        pages = self.page_indices
        if int(pages.max()) >= self.pool_pages:
            raise ValueError(f"page {int(pages.max())} of a pool of {self.pool_pages} pages")
        if len(np.unique(pages)) != len(pages):
            raise ValueError("a page is named twice")

    @property
    def page_indices(self) -> NDArray[np.uint32]:
        return np.frombuffer(self.pages, dtype=_U32)

    @property
    def tokens(self) -> NDArray[np.uint32]:
        return np.frombuffer(self.prompt, dtype=_U32)

    @property
    def writes(self) -> int:
        """How often the immediate is raised in all."""
        return self.layout.layers * (len(self.pages) // 4) + 1


class KvReject(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="reject"):
    """Prefiller to decoder: that request will not be completed, and none of its writes is under way any more."""

    request_id: _Id
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KvRequest | KvReject)


def encode(message: KvRequest | KvReject) -> bytes:
    """Return the bytes of a message. Raises ProtocolError if the peer would refuse them for their size."""
    data = _MAGIC + bytes([VERSION]) + _encoder.encode(message)
    try:
        _decode_body(data)
    except ProtocolError as error:
        raise ProtocolError(f"a message that no peer would take: {error}") from None
    return data


def decode(data: bytes) -> KvRequest | KvReject:
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
    return _decode_body(data)


def _decode_body(data: bytes) -> KvRequest | KvReject:
    try:
        message: KvRequest | KvReject = _decoder.decode(memoryview(data)[4:])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a malformed control message: {error}") from None
    return message
