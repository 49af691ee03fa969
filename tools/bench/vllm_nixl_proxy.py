"""A proxy for vLLM's NIXL connectors, built of the same parts as `fabric kv proxy`. Part of vllm_ttft.py.

    python vllm_nixl_proxy.py pull|push PORT PREFILL_PORT DECODE_PORT

pull: the prefill request, then the decode request with what came back, as NixlConnector needs it, and FabricConnector
takes it too. push: both at once under one X-Request-Id, by which NixlPushConnector matches them; the first request of
all goes as with pull, to learn where the prefill engine is.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from contextlib import suppress
from typing import Any

from fabric_kvcache.vllm.proxy_http import Backend, HttpError, Request, answer, ask, read_request, status_of

_PIECE = 64 << 10  # bytes
_ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
#: Of what a prefill engine answers, what is so for every request.
_WHERE = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "transfer_mode")


class NixlProxy:
    """One prefill and one decode engine; one kind of request, which streams."""

    def __init__(self, prefill: Backend, decode: Backend, *, at_once: bool) -> None:
        self._prefill, self._decode, self._at_once = prefill, decode, at_once
        self._where: dict[str, Any] | None = None

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await read_request(reader)
            if request is not None:
                await self._one(request, writer)
        except HttpError as error:
            await answer(writer, error.status, {"error": str(error)})
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _one(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if request.method != "POST":
            await answer(writer, 200, {"is": "up"})
            return
        body = json.loads(request.body)
        name = secrets.token_hex(12)
        request.headers.append(("X-Request-Id", name))
        first = json.dumps({**body, "max_tokens": 1, "stream": False, "kv_transfer_params": _ASKED}).encode()
        if self._where is None or not self._at_once:
            params = await self._computed(request, first)
            self._where = {key: params[key] for key in _WHERE if key in params}
            await self._relay(request, {**body, "kv_transfer_params": params}, writer)
            return
        params = {
            **self._where, "do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": f"cmpl-{name}-0",
            "remote_block_ids": [],
        }  # fmt: skip
        asked = asyncio.ensure_future(self._computed(request, first))
        await self._relay(request, {**body, "kv_transfer_params": params}, writer)
        await asked

    async def _computed(self, request: Request, body: bytes) -> dict[str, Any]:
        """Have the prompt computed. Return the kv_transfer_params of the answer."""
        reader, writer = await ask(self._prefill, request, body)
        try:
            octets = await reader.read()
        finally:
            writer.close()
        content = octets.partition(b"\r\n\r\n")[2]
        if status_of(octets) != 200:
            raise HttpError(502, content[:1000].decode(errors="replace"))
        found: dict[str, Any] = json.loads(content)["kv_transfer_params"]
        return found

    async def _relay(self, request: Request, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        reader, back = await ask(self._decode, request, json.dumps(body).encode())
        try:
            while piece := await reader.read(_PIECE):
                writer.write(piece)
                await writer.drain()
        finally:
            back.close()


async def main(mode: str, port: int, prefill: int, decode: int) -> None:
    proxy = NixlProxy(Backend("127.0.0.1", prefill), Backend("127.0.0.1", decode), at_once=mode == "push")
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", port, limit=_PIECE)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:5])))
