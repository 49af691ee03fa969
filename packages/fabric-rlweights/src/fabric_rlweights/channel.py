"""Messages of any size between engines, cut into parts; and a word about those that did not arrive."""

from __future__ import annotations

import logging
import queue
import secrets
import struct
import threading
from dataclasses import dataclass

from fabric_core import NetAddr, ProtocolError, Transfer, TransferEngine
from fabric_rlweights.protocol import MAX_BYTES, VERSION, Message, decode, encode

__all__ = ["Channel", "Event", "Lost"]

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


class Channel:
    """One engine's mail. What arrives is put into `inbox`, in whatever order it arrives."""

    def __init__(self, engine: TransferEngine, inbox: queue.Queue[Event]) -> None:
        self.engine = engine
        self.inbox = inbox
        self._size = min(engine.max_message, 1 << 16)
        self._open: dict[int, list[bytes | None]] = {}
        self._lock = threading.Lock()
        self._pool = engine.submit_recvs(self._size, _BUFFERS, self._on_part)
        engine.on_peer_lost = self._on_lost

    def send(self, addr: NetAddr | str, message: Message, timeout: float = 10.0) -> None:
        """Send; returns at once. If it does not arrive within `timeout` seconds, the inbox hears a Lost."""
        data = encode(message)
        number = secrets.randbits(64)
        room = self._size - _HEADER.size
        parts = [data[i : i + room] for i in range(0, len(data), room)] or [b""]
        told = threading.Event()

        def on_done(transfer: Transfer) -> None:
            error = transfer.exception()
            if error is not None and not told.is_set():
                told.set()
                self.inbox.put(Lost(str(addr), f"{type(message).__name__} did not arrive: {error}"))

        for index, part in enumerate(parts):
            header = _HEADER.pack(_MAGIC, number, index, len(parts))
            self.engine.submit_send(addr, header + part, on_done, timeout=timeout)

    def close(self) -> None:
        """Take no more messages."""
        self._pool.close()

    def _on_lost(self, error: object) -> None:
        peer = getattr(error, "peer", None)
        if peer:
            self.inbox.put(Lost(str(peer), str(error)))

    def _on_part(self, data: bytes) -> None:
        try:
            whole = self._whole(data)
            if whole is not None:
                self.inbox.put(decode(whole))
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
