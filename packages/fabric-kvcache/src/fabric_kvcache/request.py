"""A request as both sides know it, and its body: prompt and block tables, cut into messages and put together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from fabric_core import ProtocolError
from fabric_kvcache.protocol import Ask, indices
from fabric_kvcache.tables import Tables

__all__ = ["Assembly", "Request", "asks"]

_U32 = np.dtype("<u4")
_HEAD = 512  # bytes: more than an Ask has beside its body, its request id, its address and its table lengths


@dataclass(frozen=True, slots=True)
class Request:
    """What a decoder rank wants."""

    request_id: str
    epoch: int
    seed: int
    start: int  #: tokens that it has already
    total: int
    tokens: NDArray[np.uint32]  #: the prompt; empty if the prefiller has it from elsewhere
    tables: Tables
    tail: bool
    timeout: float  #: seconds, of the whole request


def body_of(tokens: NDArray[np.uint32], tables: Tables) -> bytes:
    return b"".join([indices(tokens), *(indices(table) for table in tables)])


def asks(head: Ask, body: bytes, max_message: int) -> Iterator[Ask]:
    """Yield the parts of a request: `head`, which has no body, with as much of the body as a message takes."""
    least = _HEAD + len(head.reply_to) + 4 * len(head.request_id) + 9 * len(head.tables)
    room = (max_message - least) // 4 * 4
    if room < 4:
        raise ProtocolError(f"a request needs messages of more than {least} bytes, this backend has {max_message}")
    for offset in range(0, max(1, len(body)), room):
        yield msgspec.structs.replace(head, offset=offset, data=body[offset : offset + room])


@dataclass(slots=True)
class Assembly:
    """A request of which parts have arrived, in any order."""

    head: Ask
    body: bytearray = field(init=False)
    parts: dict[int, int] = field(default_factory=dict)  #: offset -> bytes
    deadline: float = field(init=False)  #: of time.monotonic()

    def __post_init__(self) -> None:
        self.body = bytearray(self.head.body_bytes)
        self.deadline = time.monotonic() + self.head.timeout_ms / 1000

    def add(self, part: Ask) -> bool:
        """Take a part; True once all have arrived. Raises ProtocolError for one that does not fit the others."""
        here, there = self.head, part
        if any(getattr(here, name) != getattr(there, name) for name in _SAME):
            raise ProtocolError(f"the parts of request {here.request_id} contradict each other")
        if self.parts.setdefault(part.offset, len(part.data)) != len(part.data):
            raise ProtocolError(f"the parts of request {here.request_id} overlap")
        self.body[part.offset : part.offset + len(part.data)] = part.data
        if sum(self.parts.values()) < len(self.body):
            return False
        at = 0
        for offset, size in sorted(self.parts.items()):
            if offset != at:
                raise ProtocolError(f"the parts of request {here.request_id} overlap")
            at += size
        return at == len(self.body)

    def request(self) -> Request:
        """Return the whole. Block tables are as they came: not checked against any pool."""
        head, numbers = self.head, np.frombuffer(bytes(self.body), dtype=_U32)
        at = head.total * head.prompt
        tables = []
        for count in head.tables:
            tables.append(numbers[at : at + count])
            at += count
        return Request(
            request_id=head.request_id,
            epoch=head.epoch,
            seed=head.seed,
            start=head.start,
            total=head.total,
            tokens=numbers[: head.total * head.prompt],
            tables=tuple(tables),
            tail=head.tail,
            timeout=head.timeout_ms / 1000,
        )


_SAME = tuple(name for name in Ask.__struct_fields__ if name not in {"offset", "data", "timeout_ms"})
