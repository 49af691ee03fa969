"""What the proxy takes for a request, and for an address."""

from __future__ import annotations

import asyncio

import pytest
from vllm_fakes import LIMIT

from fabric_core import ConfigError
from fabric_kvcache.cli_proxy import _card
from fabric_kvcache.vllm.proxy import PrefillBackend, Proxy
from fabric_kvcache.vllm.proxy_http import Backend


@pytest.mark.parametrize(
    ("octets", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"411"),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"413"),
    ],
)
def test_what_is_no_request_is_refused(octets: bytes, status: bytes) -> None:
    async def work() -> None:
        proxy = Proxy([PrefillBackend(Backend("127.0.0.1", 9), ("127.0.0.1", 9))], [Backend("127.0.0.1", 9)])
        server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(octets)
            assert (await reader.readline()).split()[1] == status
            writer.close()

    asyncio.run(asyncio.wait_for(work(), LIMIT))


def test_addresses_that_make_no_sense_are_named() -> None:
    for url in ("127.0.0.1:8000", "https://h:1", "http://h", "http://h:1/v1", "http://h:x"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            Backend.parse(url)
    assert str(Backend.parse("http://h:1/")) == "http://h:1"
    assert _card("h:1") == ("h", 1)
    for text in ("h", ":1", "h:0", "h:x"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            _card(text)
