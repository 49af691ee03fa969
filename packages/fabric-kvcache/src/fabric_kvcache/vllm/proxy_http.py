"""As much of HTTP/1.1 as a proxy needs that passes answers on as they come: one request per connection, no state."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec

from fabric_core import ConfigError

__all__ = ["Backend", "HttpError", "Request", "Unreachable", "answer", "ask", "read_request", "status_of"]

_MOST_HEAD = 64 << 10  # bytes
_MOST_BODY = 64 << 20
_CONNECT = 10.0  # seconds
_HOP = frozenset({"connection", "keep-alive", "host", "content-length", "transfer-encoding", "expect", "upgrade"})


class HttpError(Exception):
    """What the client is told: a status, and a sentence or what an engine has said."""

    def __init__(self, status: int, text: str, content: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.content = content or {"error": {"message": text, "type": "fabric_kv_proxy"}}


class Unreachable(HttpError):
    """Nobody listens there: another engine may be asked, for nothing was sent."""


@dataclass(slots=True)
class Request:
    """What a client wants."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True, slots=True)
class Backend:
    """Where an engine's OpenAI server is."""

    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> Backend:
        """Read "http://host:port". Raises ConfigError."""
        try:
            found = urlsplit(url)
            host, port = found.hostname, found.port
        except ValueError:
            host = port = None
        if not host or not port or found.scheme != "http" or found.path not in {"", "/"}:
            raise ConfigError(f"{url!r}: expected http://HOST:PORT, where an engine listens")
        return cls(host, port)

    def __str__(self) -> str:
        return f"http://{self.host}:{self.port}"


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """Read one request; None: the client has left. Raises HttpError for what is none, or too large."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError:
        raise HttpError(431, f"the head of a request has more than {_MOST_HEAD} bytes") from None
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    try:
        method, target, _version = first.split(" ")
        pairs = [line.split(":", 1) for line in lines]
        headers = [(name.strip(), value.strip()) for name, value in pairs]
        fields = {name.lower(): value for name, value in headers}
        length = int(fields.get("content-length", "0"))
    except ValueError:
        raise HttpError(400, f"{first[:100]!r} does not begin a request of HTTP/1.1") from None
    if "transfer-encoding" in fields:
        raise HttpError(411, "say Content-Length: this proxy reads no chunked requests")
    if not 0 <= length <= _MOST_BODY:
        raise HttpError(413, f"a body of {length} bytes: at most {_MOST_BODY} are taken")
    try:
        return Request(method, target, headers, await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        return None


async def ask(backend: Backend, request: Request, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request with another body; what comes back is read until its end. Raises HttpError."""
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(backend.host, backend.port, limit=_MOST_HEAD), _CONNECT
        )
    except (OSError, TimeoutError) as error:
        why = str(error) or type(error).__name__
        raise Unreachable(502, f"the engine at {backend} does not answer: {why}; is it up?") from None
    lines = [f"{request.method} {request.target} HTTP/1.1", f"Host: {backend.host}:{backend.port}"]
    lines += [f"{name}: {value}" for name, value in request.headers if name.lower() not in _HOP]
    lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    try:
        writer.write("\r\n".join(lines).encode("latin-1") + body)
        await writer.drain()
    except OSError as error:
        writer.close()
        raise HttpError(502, f"the engine at {backend} has closed the connection: {error}") from None
    except BaseException:
        writer.close()
        raise
    return reader, writer


def status_of(octets: bytes) -> int:
    """Return the status with which an answer begins; 502 for what is none."""
    parts = octets[:64].split(b" ")
    known = len(parts) > 1 and octets.startswith(b"HTTP/1.") and parts[1][:3].isdigit()
    return int(parts[1][:3]) if known else 502


async def answer(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
    """Answer with JSON. A client that has left is no error."""
    body = msgspec.json.encode(content)
    known = status in {one.value for one in HTTPStatus}
    phrase = HTTPStatus(status).phrase if known else "Error"
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with suppress(OSError):
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        await writer.drain()
