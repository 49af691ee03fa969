"""`fabric kv proxy` between engines that are played by sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from vllm_fakes import LIMIT

from fabric_kvcache.vllm.card import Card, CardServer
from fabric_kvcache.vllm.params import recv_of, send_of
from fabric_kvcache.vllm.proxy import PrefillBackend, Proxy
from fabric_kvcache.vllm.proxy_http import Backend, Request, read_request

Serve = Callable[[Request, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def reply(status: int, content: Any) -> bytes:
    body = json.dumps(content).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


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


async def well(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(reply(200, {"text": "ok"}))
    await writer.drain()


@asynccontextmanager
async def listening(handle: Any) -> AsyncIterator[int]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@asynccontextmanager
async def a_proxy(prefill: Engine, decode: Engine) -> AsyncIterator[tuple[Proxy, int]]:
    async with AsyncExitStack() as stack:
        p = await stack.enter_async_context(listening(prefill.handle))
        d = await stack.enter_async_context(listening(decode.handle))
        server = CardServer("127.0.0.1", 0, lambda host, port: Card(engine="e", addresses=("a",), host=host, port=port))
        stack.callback(server.close)
        proxy = Proxy([PrefillBackend(Backend("127.0.0.1", p), ("127.0.0.1", server.port))], [Backend("127.0.0.1", d)])
        yield proxy, await stack.enter_async_context(listening(proxy.handle))


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


def test_a_request_goes_to_both_under_one_id() -> None:
    async def work() -> None:
        prefill, decode = Engine(well), Engine(well)
        async with a_proxy(prefill, decode) as (proxy, port):
            body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 9, "min_tokens": 2, "stream": True, "seed": 4}
            head, content = await post(port, body)
            assert head.startswith(b"HTTP/1.1 200")
            assert content == {"text": "ok"}
        (_, left), (_, right) = prefill.asked[0], decode.asked[0]
        assert send_of("x", left["kv_transfer_params"]) == recv_of("y", right["kv_transfer_params"]).transfer_id  # type: ignore[union-attr]
        assert (left["max_tokens"], left["stream"], left["seed"], left["prompt"]) == (1, False, 4, [1, 2, 3])
        assert "min_tokens" not in left
        assert {**right, "kv_transfer_params": None} == {**body, "kv_transfer_params": None}
        assert proxy.counts.split == 1

    run(work())


def test_two_requests_have_two_ids() -> None:
    async def work() -> None:
        prefill, decode = Engine(well), Engine(well)
        async with a_proxy(prefill, decode) as (_, port):
            chat = {"messages": [], "max_completion_tokens": 5}
            await post(port, chat, "/v1/chat/completions")
            await post(port, chat, "/v1/chat/completions")
        assert len({body["kv_transfer_params"]["transfer_id"] for _, body in decode.asked}) == 2
        assert all(body["max_completion_tokens"] == 1 and "max_tokens" not in body for _, body in prefill.asked)

    run(work())


@pytest.mark.parametrize(
    "content",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": "a", "n": 2},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}},
        [1],
        b"{no json",
    ],
)
def test_what_one_prefill_cannot_serve_is_decoded_alone(content: Any) -> None:
    async def work() -> None:
        async def any_body(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(request.body)
            await well(request, reader, writer)

        seen: list[bytes] = []
        prefill, decode = Engine(any_body), Engine(any_body)
        decode.handle = _plain(any_body)  # type: ignore[method-assign]
        async with a_proxy(prefill, decode) as (proxy, port):
            await post(port, content)
        assert not prefill.asked
        assert seen == [content if isinstance(content, bytes) else json.dumps(content).encode()]
        assert (proxy.counts.alone, proxy.counts.split) == (1, 0)

    run(work())


def _plain(serve: Serve) -> Any:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        if request is not None:
            await serve(request, reader, writer)
        writer.close()

    return handle


def test_a_stream_is_passed_on_as_it_comes() -> None:
    async def work() -> None:
        seen = asyncio.Event()

        async def stream(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
            await writer.drain()
            await seen.wait()  # the client has the first event before there is a second one
            writer.write(b"data: 2\n\n")
            await writer.drain()

        async with a_proxy(Engine(well), Engine(stream)) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b'{"prompt":"a","stream":true}'
            writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            assert await reader.readuntil(b"data: 1\n\n")
            seen.set()
            assert await reader.read() == b"data: 2\n\n"
            writer.close()

    run(work())


async def never(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine that waits for KV: it answers nothing, until the other side leaves."""
    assert await reader.read() == b""


def test_a_prefill_that_refuses_ends_the_request_with_its_reason() -> None:
    async def work() -> None:
        async def refuse(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(reply(400, {"error": {"message": "the prompt is too long"}}))
            await writer.drain()

        async def waits(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await never(request, reader, writer)
            decode.left.set()

        decode = Engine(waits)
        async with a_proxy(Engine(refuse), decode) as (proxy, port):
            head, content = await post(port, {"prompt": "a"})
            assert head.startswith(b"HTTP/1.1 400")
            assert "too long" in content["error"]["message"]
            await decode.left.wait()
            assert proxy.counts.failed == 1

    run(work())


def test_a_client_that_leaves_takes_both_along() -> None:
    async def work() -> None:
        async def waits(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            here.release()
            await never(request, reader, writer)
            gone.release()

        here, gone = asyncio.Semaphore(0), asyncio.Semaphore(0)
        async with a_proxy(Engine(waits), Engine(waits)) as (proxy, port):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b'POST /v1/completions HTTP/1.1\r\nContent-Length: 14\r\n\r\n{"prompt":"a"}')
            await here.acquire()
            await here.acquire()
            writer.close()
            await gone.acquire()
            await gone.acquire()
            assert proxy.counts.left == 1

    run(work())


def test_an_engine_that_is_not_there_is_named() -> None:
    async def work() -> None:
        proxy = Proxy([PrefillBackend(Backend("127.0.0.1", 9), ("127.0.0.1", 9))], [Backend("127.0.0.1", 9)])
        async with listening(proxy.handle) as port:
            for content, says in (({"prompt": "a"}, "card"), ({"prompt": "a", "n": 2}, "http://127.0.0.1:9")):
                head, told = await post(port, content)
                assert head.startswith(b"HTTP/1.1 502")
                assert says in told["error"]["message"]

    run(work())
