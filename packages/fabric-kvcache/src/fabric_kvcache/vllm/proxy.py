"""A proxy before prefill and decode engines: each request goes to one of both kinds at once, under one transfer id.

The prefill engine computes the prompt and one token; its layers travel while it computes. The decode engine's answer is
passed on byte for byte. If the prefill engine refuses the request, or its client leaves, the other side is cut off too.
What one prefill cannot serve (several prompts or choices in a request) goes to a decode engine alone, which computes
the prompts itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from fabric_core import FabricError
from fabric_kvcache.vllm.card import Card, fetch
from fabric_kvcache.vllm.proxy_http import Backend, HttpError, Request, answer, ask, read_request, status_of

__all__ = ["PrefillBackend", "Proxy"]

log = logging.getLogger("fabric.kvcache.proxy")

_SPLIT = frozenset({"/v1/completions", "/v1/chat/completions"})
_PIECE = 64 << 10  # bytes
_CARD_TIMEOUT = 5.0  # seconds
_ONE_TOKEN = frozenset({"stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens"})


@dataclass(slots=True)
class PrefillBackend:
    """A prefill engine, and where its card is."""

    at: Backend
    card_at: tuple[str, int]
    card: Card | None = None


@dataclass(slots=True)
class Counts:
    """Requests since the start."""

    split: int = 0
    alone: int = 0
    failed: int = 0
    left: int = 0  #: their clients had gone


class Proxy:
    """`serve` it, or give its `handle` to `asyncio.start_server`."""

    def __init__(self, prefills: Sequence[PrefillBackend], decodes: Sequence[Backend]) -> None:
        self._prefills = itertools.cycle(prefills)
        self._decodes = itertools.cycle(decodes)
        self.counts = Counts()

    async def serve(self, host: str, port: int) -> None:
        """Listen until it is cancelled."""
        server = await asyncio.start_server(self.handle, host, port, limit=64 << 10)
        async with server:
            log.info("listening at http://%s:%d", host, server.sockets[0].getsockname()[1])
            await server.serve_forever()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, which has one request."""
        try:
            request = await read_request(reader)
            if request is not None:
                await self._until_left(reader, self._one(request, writer))
        except HttpError as error:
            self.counts.failed += 1
            log.warning("%s", error)
            await answer(writer, error.status, {"error": {"message": str(error), "type": "fabric_kv_proxy"}})
        except OSError:
            self.counts.left += 1
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _until_left(self, reader: asyncio.StreamReader, work: Any) -> None:
        """Do it, unless the client leaves first: then everything that it was for is cut off."""
        doing = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_end_of(reader))
        try:
            await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                self.counts.left += 1
                return
            await doing
        finally:
            for task in (doing, gone):
                task.cancel()
            await asyncio.gather(doing, gone, return_exceptions=True)

    # ---- one request

    async def _one(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if request.target == "/fabric/proxy":
            counts = self.counts
            await answer(writer, 200, {"split": counts.split, "alone": counts.alone, "failed": counts.failed,
                                       "left": counts.left})  # fmt: skip
            return
        body = _splittable(request)
        if body is None:
            self.counts.alone += request.method == "POST"
            await self._relay(next(self._decodes), request, request.body, writer)
            return
        self.counts.split += 1
        await self._both(request, body, writer)

    async def _both(self, request: Request, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prefill = next(self._prefills)
        transfer_id = f"fabric-{secrets.token_hex(12)}"
        card = await self._card(prefill)
        first = msgspec.json.encode(_prefill_body(body, transfer_id))
        second = msgspec.json.encode({**body, "kv_transfer_params": card.params(transfer_id)})
        asked = asyncio.ensure_future(self._prefill(prefill, request, first))
        relayed = asyncio.ensure_future(self._relay(next(self._decodes), request, second, writer, asked))
        try:
            await relayed
            if not asked.done():  # the answer may be shorter than the way back from the prefill engine
                await asyncio.wait({asked}, timeout=_CARD_TIMEOUT)
        finally:
            for task in (asked, relayed):
                task.cancel()
            await asyncio.gather(asked, relayed, return_exceptions=True)

    async def _card(self, prefill: PrefillBackend) -> Card:
        if prefill.card is None:
            try:
                prefill.card = await asyncio.to_thread(fetch, *prefill.card_at, _CARD_TIMEOUT)
            except FabricError as error:
                raise HttpError(502, str(error)) from None
        return prefill.card

    async def _prefill(self, prefill: PrefillBackend, request: Request, body: bytes) -> None:
        """Have a prompt computed. Raises HttpError with what the engine says, if it does not."""
        try:
            reader, writer = await ask(prefill.at, request, body)
            try:
                octets = await reader.read()
            finally:
                writer.close()
        except (HttpError, OSError) as error:
            prefill.card = None  # when it comes back, it is another one
            raise HttpError(502, f"the prefill engine: {error}") from None
        status = status_of(octets)
        if status != 200:
            prefill.card = None
            text = octets.partition(b"\r\n\r\n")[2][:1000].decode(errors="replace")
            raise HttpError(status, f"the prefill engine at {prefill.at} answers {status}: {text or 'nothing'}")

    async def _relay(
        self,
        backend: Backend,
        request: Request,
        body: bytes,
        writer: asyncio.StreamWriter,
        asked: asyncio.Future[None] | None = None,
    ) -> None:
        """Pass an answer on. Until its first byte of content, `asked` may end it by an error."""
        reader, back = await ask(backend, request, body)
        try:
            head = await _unless(reader.readuntil(b"\r\n\r\n"), asked)
            piece = await _unless(reader.read(_PIECE), asked)
            writer.write(head)
            while piece:
                writer.write(piece)
                await writer.drain()
                piece = await reader.read(_PIECE)
            await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise HttpError(502, f"the engine at {backend} has ended its answer before it began") from None
        finally:
            back.close()


async def _end_of(reader: asyncio.StreamReader) -> None:
    """Wait until the other side has closed its connection. What it still sends is of no use."""
    while await reader.read(_PIECE):
        pass


async def _unless(reading: Any, asked: asyncio.Future[None] | None) -> bytes:
    """Read, unless the other side fails first: raises its error then."""
    task = asyncio.ensure_future(reading)
    try:
        while asked is not None and not task.done():
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                if not task.done():
                    asked.result()
                asked = None
        found: bytes = await task
        return found
    finally:
        task.cancel()


def _splittable(request: Request) -> dict[str, Any] | None:
    """Return the body of a request that one prefill can serve; None for any other."""
    if request.method != "POST" or request.target.partition("?")[0] not in _SPLIT:
        return None
    try:
        body = msgspec.json.decode(request.body)
    except (msgspec.MsgspecError, ValueError):
        return None  # the engine says what is wrong with it
    if not isinstance(body, dict) or body.get("kv_transfer_params"):
        return None
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
    one = all(body.get(key) in {None, 1} for key in ("n", "best_of")) and not body.get("use_beam_search")
    return body if one and not several and not body.get("echo") and not body.get("prompt_logprobs") else None


def _prefill_body(body: dict[str, Any], transfer_id: str) -> dict[str, Any]:
    kept = {key: value for key, value in body.items() if key not in _ONE_TOKEN}
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    return {**kept, limit: 1, "stream": False, "kv_transfer_params": params}
