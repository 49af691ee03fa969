"""Frames on a stream: a header of fixed size and a payload with a cap. Whatever does not fit is a broken peer."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

VERSION = 1
HEADER = struct.Struct("<BB2xiIIQQQ")  # kind, has_imm, status, imm, length, seq, key, addr
MAX_WRITE = 1 << 20
MAX_SEND = 1 << 16
OUT_FULL = 1 << 18  # bytes waiting for the kernel: beyond that nothing more is framed
READ_AT_ONCE = 1 << 18


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1  # caller's first: seq = version, payload = the incarnation it wants
    WELCOME = 2  # the answer: status
    WRITE = 3
    SEND = 4
    CANCEL = 5  # of the SEND `seq`, if it still waits for a buffer
    ACK = 6  # of WRITE or SEND `seq`: status
    PING = 7
    PONG = 8


#: The longest payload of each kind; other kinds do not exist.
LIMITS = {Kind.HELLO: 64, Kind.WELCOME: 0, Kind.WRITE: MAX_WRITE, Kind.SEND: MAX_SEND}
LIMITS |= dict.fromkeys((Kind.CANCEL, Kind.ACK, Kind.PING, Kind.PONG), 0)


class Frame(NamedTuple):
    """One message of the protocol."""

    kind: int
    seq: int = 0
    status: int = 0
    imm: int | None = None
    key: int = 0
    addr: int = 0
    payload: bytes = b""


class Stream:
    """One connection: frames in, frames out, never blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._in = bytearray()
        self._out: deque[memoryview] = deque()
        self.waiting = 0  # bytes in _out

    def push(self, frame: Frame) -> None:
        has_imm, imm = frame.imm is not None, frame.imm or 0
        fields = (frame.status, imm, len(frame.payload), frame.seq, frame.key, frame.addr)
        data = HEADER.pack(frame.kind, has_imm, *fields) + frame.payload
        self._out.append(memoryview(data))
        self.waiting += len(data)

    def flush(self) -> None:
        """Give the kernel what it takes. Raises OSError when the connection is gone."""
        while self._out:
            try:
                sent = self.sock.send(self._out[0])
            except BlockingIOError:
                return
            self.waiting -= sent
            if sent == len(self._out[0]):
                self._out.popleft()
            else:
                self._out[0] = self._out[0][sent:]

    def pull(self) -> Iterator[Frame]:
        """Yield the frames that are complete. Raises OSError: connection gone; ValueError: not our protocol."""
        for _ in range(4):
            try:
                data = self.sock.recv(READ_AT_ONCE)
            except BlockingIOError:
                break
            if not data:  # what we did not acknowledge has failed for the peer: it must not happen now
                raise ConnectionResetError
            self._in += data
        at = 0
        while len(self._in) - at >= HEADER.size:
            kind, has_imm, status, imm, length, seq, key, addr = HEADER.unpack_from(self._in, at)
            if length > LIMITS.get(kind, -1):
                raise ValueError(f"frame of kind {kind} with {length} bytes")
            if len(self._in) - at < HEADER.size + length:
                break
            payload = bytes(memoryview(self._in)[at + HEADER.size : at + HEADER.size + length])
            at += HEADER.size + length
            yield Frame(kind, seq, status, imm if has_imm else None, key, addr, payload)
        del self._in[:at]
