"""`fabric kv proxy` when something is amiss: engines that are dead, die, or were started anew; clients that leave."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any

import pytest
from vllm_fakes import LIMIT
from vllm_proxied import NOBODY, Engine, a_proxy, never, post, reply, run, well

from fabric_kvcache.vllm import proxy_engines
from fabric_kvcache.vllm.proxy_engines import PrefillBackend
from fabric_kvcache.vllm.proxy_http import Request

DEAD = ("127.0.0.1", 9)
ASK = b'POST /v1/completions HTTP/1.1\r\nContent-Length: 14\r\n\r\n{"prompt":"a"}'


def test_dead_engines_are_left_out() -> None:
    async def work() -> None:
        prefill, decode = Engine(well), Engine(well)
        async with a_proxy(prefill, decode, before=[PrefillBackend(NOBODY, DEAD)], instead=[NOBODY]) as (
            proxy,
            port,
            _,
        ):
            for _ in range(4):
                head, content = await post(port, {"prompt": "a"})
                assert head.startswith(b"HTTP/1.1 200"), content
        assert len(prefill.asked) == len(decode.asked) == 4
        assert proxy.counts.failed == 0

    run(work())


def test_a_dead_prefiller_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        read: list[Any] = []

        def fetch(*where: Any) -> Any:
            read.append(where)
            return real(*where)

        real = proxy_engines.fetch
        monkeypatch.setattr(proxy_engines, "fetch", fetch)
        monkeypatch.setattr(proxy_engines, "_PAUSE", LIMIT)
        dead = PrefillBackend(NOBODY, DEAD)
        async with a_proxy(Engine(well), Engine(well), before=[dead]) as (_, port, _):
            await post(port, {"prompt": "a"})
            await post(port, {"prompt": "a"})
            await post(port, {"prompt": "a"})
            assert [where[1] for where in read].count(9) == 1, "not for every request"
            dead.down = (0.0, dead.down[1])  # a while later
            async with dead.lock:  # somebody tries again, which takes long
                head, _ = await post(port, {"prompt": "a"})
                await post(port, {"prompt": "a"})
            assert head.startswith(b"HTTP/1.1 200")
            assert [where[1] for where in read].count(9) == 1
            await post(port, {"prompt": "a"})
            await post(port, {"prompt": "a"})
            assert [where[1] for where in read].count(9) == 2

    run(work())


def test_a_prefiller_that_was_started_anew_is_known_by_its_new_card(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        prefill, decode = Engine(well), Engine(well)
        async with a_proxy(prefill, decode) as (_, port, cards):
            await post(port, {"prompt": "a"})
            await post(port, {"prompt": "a"})
            cards.anew()
            monkeypatch.setattr(proxy_engines, "_FRESH", 0.0)  # no engine starts that fast
            await post(port, {"prompt": "a"})
        engines = [body["kv_transfer_params"]["remote_engine_id"] for _, body in decode.asked]
        assert engines == ["e1", "e1", "e2"]

    run(work())


def test_a_request_that_fails_has_the_card_read_again() -> None:
    async def work() -> None:
        async def fails(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(reply(500, {"error": "its KV did not come"}))

        decode = Engine(fails)
        async with a_proxy(Engine(well), decode) as (_, port, cards):
            await post(port, {"prompt": "a"})
            cards.anew()
            await post(port, {"prompt": "a"})
        engines = [body["kv_transfer_params"]["remote_engine_id"] for _, body in decode.asked]
        assert engines == ["e1", "e2"]

    run(work())


def test_a_prompt_whose_client_has_left_is_dropped_until_that_is_heard() -> None:
    """The prefill engine has answered, the decode engine has not asked: no abort reaches either."""

    async def work() -> None:
        async def waits(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            here.set()
            await never(request, reader, writer)

        here = asyncio.Event()
        prefill = Engine(well)
        async with a_proxy(prefill, Engine(waits)) as (_, port, cards):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK)
            await here.wait()
            assert not cards.drops
            writer.close()
            while len(cards.drops) < 2:  # it is not known when it is told first
                cards.dropped.clear()
                await cards.dropped.wait()
            params = prefill.asked[0][1]["kv_transfer_params"]
            assert set(cards.drops) == {(params["transfer_id"], params["drop_key"])}

    run(work())


@pytest.mark.parametrize("slow", [False, True])
def test_a_request_that_goes_well_is_not_dropped(slow: bool) -> None:
    """Its client may leave with the answer before the prefill engine has said its own."""

    async def work() -> None:
        async def late(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if slow:
                await left.wait()
            writer.write(reply(200, {}))

        left = asyncio.Event()
        async with a_proxy(Engine(late), Engine(well)) as (proxy, port, cards):
            await post(port, {"prompt": "a"})
            left.set()
            await asyncio.gather(*proxy._endings)
            assert not cards.drops
            assert proxy.counts.left == 0

    run(work())


@pytest.mark.parametrize("how", ["with an error", "by a reset"])
def test_what_the_decode_engine_does_not_serve_is_dropped(how: str) -> None:
    async def work() -> None:
        async def fails(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if how == "with an error":
                writer.write(reply(400, {"error": "max_tokens must be at least 1"}))
                return
            found: socket.socket = writer.get_extra_info("socket")
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

        async with a_proxy(Engine(well), Engine(fails)) as (proxy, port, cards):
            head, content = await post(port, {"prompt": "a"})
            if how == "with an error":
                assert head.startswith(b"HTTP/1.1 400")
            else:
                assert head.startswith(b"HTTP/1.1 502")
                assert "before it began" in content["error"]["message"]
                assert (proxy.counts.failed, proxy.counts.left) == (1, 0)
            await cards.dropped.wait()

    run(work())


def test_an_engine_that_dies_in_its_answer_leaves_it_short() -> None:
    async def work() -> None:
        async def dies(request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n")
            await writer.drain()
            await seen.wait()
            found: socket.socket = writer.get_extra_info("socket")
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

        seen = asyncio.Event()
        async with a_proxy(Engine(well), Engine(dies)) as (_, port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK)
            assert await reader.readuntil(b"data:\r\n")
            seen.set()
            assert await reader.read() == b"", "no last chunk, and no second head"
            with suppress(OSError):
                writer.close()

    run(work())
