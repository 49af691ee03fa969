"""Engines that are played by sockets, and `fabric kv proxy` before them in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from vllm_fakes import LIMIT

from fabric_kvcache.vllm.card import Card, CardServer
from fabric_kvcache.vllm.proxy import Proxy
from fabric_kvcache.vllm.proxy_engines import PrefillBackend
from fabric_kvcache.vllm.proxy_http import Backend, Request, read_request

Serve = Callable[[Request, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
NOBODY = Backend("127.0.0.1", 9)


def reply(status: int, content: Any) -> bytes:
    body = json.dumps(content).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def well(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(reply(200, {"text": "ok"}))
    await writer.drain()


async def never(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine that waits for KV: it answers nothing, until the other side leaves."""
    assert await reader.read() == b""


class Engine:
    """Plays an engine: notes what it is asked, and answers by `serve`."""

    def __init__(self, serve: Serve) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.left = asyncio.Event()  #: a connection was closed by the other side before its answer
        self._serve = serve

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        if request is not None:
            self.asked.append((request.target, json.loads(request.body) if request.body else None))
            await self._serve(request, reader, writer)
        writer.close()


@asynccontextmanager
async def listening(handle: Any) -> AsyncIterator[int]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class Cards:
    """A prefill engine's card, which may be another one from some moment on; and what was dropped there."""

    def __init__(self) -> None:
        self.drops: list[tuple[str, str]] = []
        self.dropped = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._server = self._serve(0, "e1")
        self.port = self._server.port

    def _serve(self, port: int, engine: str) -> CardServer:
        return CardServer(
            "127.0.0.1",
            port,
            lambda host, port: Card(engine=engine, addresses=("a",), host=host, port=port),
            self._drop,
        )

    def _drop(self, transfer_id: str, key: str) -> bool:
        self.drops.append((transfer_id, key))
        self._loop.call_soon_threadsafe(self.dropped.set)
        return len(self.drops) > 1  # not known yet when it is told first

    def anew(self) -> None:
        """The engine was started anew."""
        self._server.close()
        self._server = self._serve(self.port, "e2")

    def close(self) -> None:
        self._server.close()


@asynccontextmanager
async def a_proxy(
    prefill: Engine, decode: Engine, *, before: Sequence[PrefillBackend] = (), instead: Sequence[Backend] = ()
) -> AsyncIterator[tuple[Proxy, int, Cards]]:
    """Gives the proxy, its port and the cards. `before`, `instead`: engines whose turn comes earlier."""
    async with AsyncExitStack() as stack:
        p = await stack.enter_async_context(listening(prefill.handle))
        d = await stack.enter_async_context(listening(decode.handle))
        cards = Cards()
        stack.callback(cards.close)
        mine = PrefillBackend(Backend("127.0.0.1", p), ("127.0.0.1", cards.port))
        proxy = Proxy([*before, mine], [*instead, Backend("127.0.0.1", d)])
        yield proxy, await stack.enter_async_context(listening(proxy.handle)), cards


async def post(port: int, content: Any, target: str = "/v1/completions") -> tuple[bytes, Any]:
    """Return (head, JSON)."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    octets = await reader.read()
    writer.close()
    head, _, rest = octets.partition(b"\r\n\r\n")
    return head, json.loads(rest)


def run(work: Awaitable[Any]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work, LIMIT)

    asyncio.run(bounded())
