"""`fabric kv proxy` between engines that are played by sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from vllm_proxied import NOBODY, Engine, Serve, a_proxy, listening, never, post, reply, run, well

from fabric_kvcache.vllm.params import key_of, recv_of, send_of
from fabric_kvcache.vllm.proxy import Proxy
from fabric_kvcache.vllm.proxy_engines import PrefillBackend
from fabric_kvcache.vllm.proxy_http import Request, read_request


def test_a_request_goes_to_both_under_one_id() -> None:
    async def work() -> None:
        prefill, decode = Engine(well), Engine(well)
        async with a_proxy(prefill, decode) as (proxy, port, _):
            body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 9, "min_tokens": 2, "stream": True, "seed": 4}
            head, content = await post(port, body)
            assert head.startswith(b"HTTP/1.1 200")
            assert content == {"text": "ok"}
        (_, left), (_, right) = prefill.asked[0], decode.asked[0]
        assert send_of("x", left["kv_transfer_params"]) == recv_of("y", right["kv_transfer_params"]).transfer_id  # type: ignore[union-attr]
        assert key_of(left["kv_transfer_params"])
        assert key_of(right["kv_transfer_params"]) == "", "it is between the proxy and the prefill engine"
        assert (left["max_tokens"], left["stream"], left["seed"], left["prompt"]) == (1, False, 4, [1, 2, 3])
        assert "min_tokens" not in left
        assert {**right, "kv_transfer_params": None} == {**body, "kv_transfer_params": None}
        assert proxy.counts.split == 1

    run(work())


def test_two_requests_have_two_ids() -> None:
    async def work() -> None:
        prefill, decode = Engine(well), Engine(well)
        async with a_proxy(prefill, decode) as (_, port, _):
            chat = {"messages": [], "max_completion_tokens": 5}
            await post(port, chat, "/v1/chat/completions")
            await post(port, chat, "/v1/chat/completions")
        assert len({body["kv_transfer_params"]["transfer_id"] for _, body in decode.asked}) == 2
        assert all(body["max_completion_tokens"] == body["max_tokens"] == 1 for _, body in prefill.asked)

    run(work())


@pytest.mark.parametrize(
    "content",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": "a", "n": 2},
        {"prompt": "a", "n": [2]},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}},
        [1],
        b"{no json",
        b"[" * 100_000,
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
        async with a_proxy(prefill, decode) as (proxy, port, _):
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

        async with a_proxy(Engine(well), Engine(stream)) as (_, port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b'{"prompt":"a","stream":true}'
            writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            assert await reader.readuntil(b"data: 1\n\n")
            seen.set()
            assert await reader.read() == b"data: 2\n\n"
            writer.close()

    run(work())


def test_a_prefill_that_refuses_ends_the_request_with_its_reason() -> None:
    async def work() -> None:
        async def refuse(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(reply(400, {"error": {"message": "the prompt is too long", "type": "BadRequestError"}}))
            await writer.drain()

        async def waits(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await never(request, reader, writer)
            decode.left.set()

        decode = Engine(waits)
        async with a_proxy(Engine(refuse), decode) as (proxy, port, _):
            head, content = await post(port, {"prompt": "a"})
            assert head.startswith(b"HTTP/1.1 400")
            assert content == {"error": {"message": "the prompt is too long", "type": "BadRequestError"}}
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
        async with a_proxy(Engine(waits), Engine(waits)) as (proxy, port, _):
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
        proxy = Proxy([PrefillBackend(NOBODY, ("127.0.0.1", 9))], [NOBODY])
        async with listening(proxy.handle) as port:
            for content, says in (({"prompt": "a"}, "card"), ({"prompt": "a", "n": 2}, "http://127.0.0.1:9")):
                head, told = await post(port, content)
                assert head.startswith(b"HTTP/1.1 502")
                assert says in told["error"]["message"]

    run(work())
