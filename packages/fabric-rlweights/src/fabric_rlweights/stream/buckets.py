"""How a sequence of tensors is cut into buckets, and what stands in one.

    64 bytes: magic, bytes of data, bytes of the head | data | head

The cut follows from names, shapes and types alone, so all senders make the same one without a word. A tensor that does
not fit is continued in the next bucket.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from fabric_core import ConfigError, ProtocolError
from fabric_rlweights.dtypes import itemsize_of, name_of

__all__ = ["Chain", "Cutter", "Head", "Piece", "data_of", "put_head", "slot_bytes", "take_head"]

_PREFIX = struct.Struct("<8sQQ")
_MAGIC = b"RLbucket"
_DATA = 64  #: where data begins: a multiple of any element's size
_HEAD = 1 << 20  #: bytes that a head may have
_ALIGN = 64


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Part of a tensor, or all of it."""

    name: str
    shape: tuple[int, ...]  #: of the whole tensor
    dtype: str
    start: int  #: where in the tensor, in bytes
    at: int  #: where in the bucket's data, in bytes
    nbytes: int

    @property
    def whole(self) -> int:
        """Bytes of the whole tensor."""
        count = itemsize_of(self.dtype)
        for extent in self.shape:
            count *= extent
        return count


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a bucket says of itself."""

    session: int
    bucket: int
    last: bool
    tensors: int  #: begun so far, in this bucket and all before
    chain: bytes  #: digest of their names, shapes and types
    pieces: list[Piece]


class Chain:
    """A running digest of which tensors there were. Ranks that saw different ones have different digests."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.tensors = 0

    def add(self, piece: Piece) -> None:
        """Count a tensor, at its first piece."""
        if piece.start == 0:
            self.tensors += 1
            self._hash.update(msgspec.msgpack.encode((piece.name, piece.shape, piece.dtype)))

    @property
    def digest(self) -> bytes:
        """16 bytes."""
        return self._hash.digest()


class Cutter:
    """Places tensors. `bucket`: the one that is being filled."""

    def __init__(self, size: int) -> None:
        if size < 1 << 10:
            raise ConfigError(f"a bucket of {size} bytes: at least 1024")
        self._size = size
        self._fill = 0
        self._head = 0
        self.bucket = 0

    def add(self, name: str, tensor: Any) -> Iterator[tuple[int, Piece]]:
        """Give (bucket, piece) for each piece of a tensor, in order. Raises ConfigError for a name that is too long."""
        shape, dtype, nbytes = tuple(tensor.shape), name_of(tensor.dtype), tensor.numel() * tensor.element_size()
        words = len(name.encode()) + 9 * len(shape) + 64
        if words > _HEAD // 4:
            raise ConfigError(f"a tensor's name of {len(name)} letters: at most {_HEAD // 4} bytes")
        start = 0
        while True:
            at = -(-self._fill // _ALIGN) * _ALIGN
            room = (self._size - at) // _ALIGN * _ALIGN
            if (room <= 0 and nbytes) or self._head + words > _HEAD - 256:
                self.bucket, self._fill, self._head = self.bucket + 1, 0, 0
                continue
            length = min(nbytes - start, room)
            self._fill, self._head = at + length, self._head + words
            yield self.bucket, Piece(name, shape, dtype, start, at, length)
            start += length
            if start >= nbytes:
                return


def slot_bytes(size: int) -> int:
    """Return the memory that a bucket of so many bytes of data needs."""
    return _DATA + -(-size // _ALIGN) * _ALIGN + _HEAD


def data_of(slot: Any) -> Any:
    """Return where the data of a bucket lie in its memory (a tensor of uint8)."""
    return slot[_DATA:]


def put_head(slot: Any, head: Head, data: int) -> int:
    """Write what a bucket says of itself; return the bytes to be sent. `data`: bytes of it."""
    import torch

    blob = msgspec.msgpack.encode(head)
    slot[: _PREFIX.size] = torch.frombuffer(bytearray(_PREFIX.pack(_MAGIC, data, len(blob))), dtype=torch.uint8)
    slot[_DATA + data : _DATA + data + len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    return _DATA + data + len(blob)


def take_head(slot: Any) -> Head:
    """Read what a bucket says of itself. Raises ProtocolError for anything else (C12)."""
    magic, data, length = _PREFIX.unpack(slot[: _PREFIX.size].cpu().numpy().tobytes())
    if magic != _MAGIC or length > _HEAD or _DATA + data + length > len(slot):
        raise ProtocolError(f"what was written is no bucket: it begins with {magic!r}, {data}, {length}")
    blob = slot[_DATA + data : _DATA + data + length].cpu().numpy().tobytes()
    try:
        head = msgspec.msgpack.decode(blob, type=Head)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the head of a bucket cannot be read: {error}") from None
    for piece in head.pieces:
        if min(piece.start, piece.at, piece.nbytes, *piece.shape, 0) < 0 or piece.at % _ALIGN:
            raise ProtocolError(f"{piece.name}: numbers below 0, or a piece that is not aligned: {piece}")
        if piece.at + piece.nbytes > data or piece.start + piece.nbytes > piece.whole:
            raise ProtocolError(f"{piece.name}: {piece} is outside of its bucket of {data} bytes, or of its tensor")
    return head
