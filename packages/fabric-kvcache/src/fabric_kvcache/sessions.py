"""What a prefill rank knows of each decoder rank: one session per `Decoder` object, made by its Hello.

A decoder that was restarted comes back under its old address with another incarnation: at its first Hello everything
that belongs to its old self ends. Memory is bounded: so many sessions, so many bytes of requests in parts, and so many
cancelled requests remembered, because a Cancel may overtake the Ask that it is meant for.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from fabric_core import BadRange, FabricError, MrDesc, NetAddr, ProtocolError, TransferEngine
from fabric_kvcache.match import match
from fabric_kvcache.protocol import SEAL, Ask, Hello
from fabric_kvcache.request import Assembly, Request
from fabric_kvcache.shard import Shard
from fabric_kvcache.tables import checked
from fabric_kvcache.watch import PeerWatch

__all__ = ["Session", "objection", "place"]

_CANCELLED = 1 << 16  # cancelled requests that a session remembers
_ASSEMBLING = 64 << 20  # bytes of one session's requests in parts


def place(address: NetAddr) -> tuple[str, ...]:
    """Return an address without its incarnation: the same after a restart."""
    return (address.backend, *(domain.partition("#")[0] for domain in address.domains))


def objection(hello: Hello, mine: Shard, tail_bytes: int) -> str | None:
    """Say why this pair cannot work, in a sentence with both sides' values; None if it can."""
    try:
        match(mine.layout, hello.layout)
        theirs = Shard(hello.layout, tp=hello.tp, pp=hello.pp, pages=hello.pages, bases=hello.bases)
        nbytes = theirs.nbytes
    except FabricError as error:
        return str(error)
    if hello.tail_bytes != tail_bytes:
        return f"the decoder wants a tail of {hello.tail_bytes} bytes, the prefiller's has {tail_bytes}"
    desc, slots = MrDesc.from_bytes(hello.desc), MrDesc.from_bytes(hello.slots)
    if desc.nbytes < nbytes:
        return f"the decoder's memory of {desc.nbytes} bytes does not hold its pools of {nbytes} bytes"
    if not desc.writable or not slots.writable:
        return "the decoder's memory is registered without the right to write"
    return None


class Session:
    """One decoder rank. Used by the callback thread only, but for `address`, `shard` and the descriptors."""

    def __init__(self, engine: TransferEngine, hello: Hello, on_lost: Callable[[Session, FabricError], object]) -> None:
        self.id = secrets.randbits(62)
        self.decoder = hello.decoder
        self.instance = hello.instance
        self.address = NetAddr.from_bytes(hello.reply_to)
        self.place = place(self.address)
        self.shard = Shard(hello.layout, tp=hello.tp, pp=hello.pp, pages=hello.pages, bases=hello.bases)
        self.desc = MrDesc.from_bytes(hello.desc)  # one object: the engine keeps what it knows of it
        self.slots = MrDesc.from_bytes(hello.slots)
        self.tail_bytes = hello.tail_bytes
        self.targets = 0  #: of this session, with something under way; guarded by the reception's lock
        self.leaving = ""  #: why the prefiller leaves it; it says so when no target is left
        self.assemblies: dict[int, Assembly] = {}
        self._bytes = 0  # of the assemblies
        self._cancelled: OrderedDict[int, None] = OrderedDict()
        self.watch = PeerWatch(engine, self.address, lambda error: on_lost(self, error))

    def cancelled(self, epoch: int) -> None:
        """Whatever of this request has not arrived yet is not to be served."""
        self.forget(epoch)
        self._cancelled[epoch] = None
        if len(self._cancelled) > _CANCELLED:
            self._cancelled.popitem(last=False)

    def forget(self, epoch: int) -> None:
        assembly = self.assemblies.pop(epoch, None)
        if assembly is not None:
            self._bytes -= len(assembly.body)

    def take(self, part: Ask, most: int) -> Assembly | None:
        """Take a part of a request; return it when it is whole. Raises ProtocolError, and BadRange: no room for it."""
        if part.epoch in self._cancelled:
            return None
        assembly = self.assemblies.get(part.epoch)
        if assembly is None:
            size = part.body_bytes
            if len(part.data) < size:
                self._purge()
                if len(self.assemblies) >= most or self._bytes + size > _ASSEMBLING:
                    raise BadRange(f"{len(self.assemblies)} requests with {self._bytes} bytes are arriving already")
            assembly = self.assemblies[part.epoch] = Assembly(part)
            self._bytes += size
        try:
            whole = assembly.add(part)
        except ProtocolError:
            self.forget(part.epoch)
            raise
        if not whole:
            return None
        self.forget(part.epoch)
        return assembly

    def _purge(self) -> None:
        now = time.monotonic()
        for epoch in [epoch for epoch, one in self.assemblies.items() if one.deadline < now]:
            self.forget(epoch)

    def wrong(self, head: Ask, request: Request) -> str | None:
        """Say what a request has that does not fit this decoder's memory; None if it fits."""
        try:
            checked(self.shard, request.tables, request.start, request.total)
        except BadRange as error:
            return str(error)
        ends = [(head.seal_offset, SEAL.size)] + [(head.tail_offset, self.tail_bytes)] * head.tail
        for offset, nbytes in ends:
            if offset + nbytes > self.slots.nbytes:
                return f"bytes {offset} to {offset + nbytes} of a memory of {self.slots.nbytes} for seals and tails"
        return None

    def close(self) -> None:
        self.watch.close()
        self.assemblies.clear()
