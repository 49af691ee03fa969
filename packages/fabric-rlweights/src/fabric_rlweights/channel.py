"""Messages of any size between engines, cut into parts; and a word about those that did not arrive."""

from __future__ import annotations

import logging
import queue
import secrets
import struct
import threading
import time
from dataclasses import dataclass

import msgspec

from fabric_core import ConfigError, FabricError, NetAddr, ProtocolError, Transfer, TransferEngine
from fabric_rlweights.protocol import MAX_BYTES, VERSION, Message, Offer, decode, encode

__all__ = ["Channel", "Event", "Lost", "address"]

log = logging.getLogger("fabric.rlweights")
_HEADER = struct.Struct("<4sQII")  #: magic and version, number of the message, part, parts
_MAGIC = b"RLW" + bytes([VERSION])
_BUFFERS = 64
_OPEN = 256  #: messages of which parts are missing; the oldest goes when there are more


@dataclass(frozen=True)
class Lost:
    """Somebody is gone, or a message to it did not arrive."""

    addr: str
    reason: str


Event = Message | Lost


def address(given: NetAddr | str) -> NetAddr | str:
    """Return the address of a controller as it was given. Raises ProtocolError if it is none."""
    if not isinstance(given, NetAddr):
        NetAddr.parse(given)
    return given


class Channel:
    """One engine's mail. What arrives is put into `inbox`, in whatever order it arrives."""

    def __init__(self, engine: TransferEngine, inbox: queue.Queue[Event]) -> None:
        owner = getattr(engine.on_peer_lost, "__self__", None)
        if isinstance(owner, Channel):  # messages for one would be taken by the other
            raise ConfigError(
                f"engine {engine.address} already belongs to another trainer, receiver or controller; each needs an "
                "engine of its own: TransferEngine.open()"
            )
        self.engine = engine
        self.inbox = inbox
        self._size = min(engine.max_message, 1 << 16)
        self._open: dict[int, list[bytes | None]] = {}
        self._lock = threading.Lock()
        self._sending = 0  # parts under way
        self._sent = threading.Condition()
        self._pool = engine.submit_recvs(self._size, _BUFFERS, self._on_part)
        engine.on_peer_lost = self._on_lost

    def send(self, addr: NetAddr | str, message: Message, timeout: float = 10.0) -> None:
        """Send; returns at once. If it does not arrive within `timeout` seconds, the inbox hears a Lost."""
        data = encode(message)
        number = secrets.randbits(64)
        room = self._size - _HEADER.size
        parts = [data[i : i + room] for i in range(0, len(data), room)] or [b""]
        told = threading.Event()

        def failed(error: BaseException) -> None:
            if not told.is_set():
                told.set()
                self.inbox.put(Lost(str(addr), f"{type(message).__name__} did not arrive: {error}"))

        def on_done(transfer: Transfer) -> None:
            self._count(-1)
            try:
                transfer.wait(0)  # not `exception()`: it polls, and the worker leaves what comes next to who polls
            except FabricError as error:
                failed(error)

        for index, part in enumerate(parts):
            header = _HEADER.pack(_MAGIC, number, index, len(parts))
            self._count(1)
            try:
                self.engine.submit_send(addr, header + part, on_done, timeout=timeout)
            except FabricError as error:
                self._count(-1)
                failed(error)
                return

    def _count(self, parts: int) -> None:
        with self._sent:
            self._sending += parts
            if not self._sending:
                self._sent.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until everything that was sent has arrived, or has failed. Returns False when the time is up."""
        with self._sent:
            return self._sent.wait_for(lambda: not self._sending, timeout)

    def close(self) -> None:
        """Take no more messages."""
        self._pool.close()
        if getattr(self.engine.on_peer_lost, "__self__", None) is self:
            self.engine.on_peer_lost = None

    def _on_lost(self, error: object) -> None:
        peer = getattr(error, "peer", None)
        if peer:
            self.inbox.put(Lost(str(peer), str(error)))

    def _on_part(self, data: bytes) -> None:
        try:
            whole = self._whole(data)
            if whole is not None:
                message = decode(whole)
                if isinstance(message, Offer):
                    message = msgspec.structs.replace(message, arrived=time.monotonic())
                self.inbox.put(message)
        except ProtocolError as error:
            log.warning("a message was thrown away: %s", error)

    def _whole(self, data: bytes) -> bytes | None:
        if len(data) < _HEADER.size:
            raise ProtocolError(f"{len(data)} bytes are no message of fabric-rlweights")
        magic, number, index, parts = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise ProtocolError(f"no message of fabric-rlweights, or of another version than {VERSION}")
        if not 0 <= index < parts or parts * (self._size - _HEADER.size) > MAX_BYTES + self._size:
            raise ProtocolError(f"part {index} of {parts}")
        body = data[_HEADER.size :]
        if parts == 1:
            return body
        with self._lock:
            found = self._open.setdefault(number, [None] * parts)
            if len(found) != parts:
                raise ProtocolError(f"a message of {len(found)} and of {parts} parts")
            found[index] = body
            if any(part is None for part in found):
                while len(self._open) > _OPEN:
                    self._open.pop(next(iter(self._open)))
                    log.warning("a message was thrown away: its other parts did not come")
                return None
            del self._open[number]
        return b"".join(part for part in found if part is not None)
