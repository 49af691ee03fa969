"""A proxy before prefill and decode engines: each request goes to one of both kinds at once, under one transfer id.

The prefill engine computes the prompt and one token; its layers travel while it computes. The decode engine's answer is
passed on byte for byte. If the prefill engine refuses the request, or its client leaves, the other side is cut off too,
and the prefill engine is told that nobody will ask for the prompt. Engines that do not answer are left out.
What one prefill cannot serve (several prompts or choices in a request) goes to a decode engine alone, which computes
the prompts itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from fabric_kvcache.vllm.proxy_bodies import error_of, prefill_body, splittable
from fabric_kvcache.vllm.proxy_engines import PrefillBackend, Turns, drop, ready
from fabric_kvcache.vllm.proxy_http import (
    Backend,
    HttpError,
    Request,
    Unreachable,
    answer,
    ask,
    read_request,
    status_of,
)

__all__ = ["PrefillBackend", "Proxy"]

log = logging.getLogger("fabric.kvcache.proxy")

_PIECE = 64 << 10  # bytes
_LATE = 5.0  # seconds: how much longer than the decode engine's answer the prefill engine's may take


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
        self._prefills = Turns(prefills)
        self._decodes = Turns(decodes)
        self._endings: set[asyncio.Task[None]] = set()  # kept here lest they are collected
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
            await answer(writer, error.status, error.content)
        except OSError:
            self.counts.left += 1
        except Exception as error:  # whatever it is, its client must not wait for an answer for ever
            self.counts.failed += 1
            log.exception("a request was not served")
            await answer(writer, 500, {"error": {"message": repr(error), "type": "fabric_kv_proxy"}})
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
        body = splittable(request)
        if body is None:
            self.counts.alone += request.method == "POST"
            await self._relay(request, request.body, writer)
            return
        self.counts.split += 1
        await self._both(request, body, writer)

    async def _both(self, request: Request, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prefill, card = await ready(self._prefills)
        transfer_id, key = f"fabric-{secrets.token_hex(12)}", secrets.token_hex(16)
        first = msgspec.json.encode(prefill_body(body, transfer_id, key))
        second = msgspec.json.encode({**body, "kv_transfer_params": card.params(transfer_id)})
        asked = asyncio.ensure_future(self._prefill(prefill, request, first))
        relayed = asyncio.ensure_future(self._relay(request, second, writer, asked))
        well = False
        try:
            well = await relayed == 200
        finally:
            relayed.cancel()
            await asyncio.gather(relayed, return_exceptions=True)
            # In a task of its own: a client that has its answer may leave.
            ending = asyncio.ensure_future(_settle(prefill, asked, well, transfer_id, key))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _prefill(self, prefill: PrefillBackend, request: Request, body: bytes) -> None:
        """Have a prompt computed. Raises HttpError with what the engine says, if it does not."""
        try:
            reader, writer = await ask(prefill.at, request, body)
            try:
                octets = await reader.read()
            finally:
                writer.close()
        except (HttpError, OSError) as error:
            raise HttpError(502, f"the prefill engine: {error}") from None
        status = status_of(octets)
        if status != 200:
            said = octets.partition(b"\r\n\r\n")[2]
            text = said[:1000].decode(errors="replace") or "nothing"
            raise HttpError(status, f"the prefill engine at {prefill.at} answers {status}: {text}", error_of(said))

    async def _relay(
        self,
        request: Request,
        body: bytes,
        writer: asyncio.StreamWriter,
        asked: asyncio.Future[None] | None = None,
    ) -> int:
        """Pass an answer on, and return its status. Until its first byte of content, `asked` may end it by an error."""
        backend, reader, back = await self._decode(request, body)
        try:
            try:
                head = await _unless(reader.readuntil(b"\r\n\r\n"), asked)
                piece = await _unless(reader.read(_PIECE), asked)
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
                raise HttpError(502, f"the engine at {backend} has ended its answer before it began") from None
            writer.write(head)
            while piece:
                writer.write(piece)
                await writer.drain()
                piece = await _rest(reader, backend)
            await writer.drain()
        finally:
            back.close()
        return status_of(head)

    async def _decode(
        self, request: Request, body: bytes
    ) -> tuple[Backend, asyncio.StreamReader, asyncio.StreamWriter]:
        """Ask the next decode engine that can be reached. Raises HttpError."""
        why: list[str] = []
        for backend in self._decodes.all():
            try:
                return (backend, *await ask(backend, request, body))
            except Unreachable as error:
                why.append(str(error))
        raise HttpError(502, "; ".join(why))


async def _settle(
    prefill: PrefillBackend, asked: asyncio.Future[None], answered: bool, transfer_id: str, key: str
) -> None:
    """End what was asked of a prefill engine. `answered`: the decode engine has answered well, and so may it soon."""
    if answered:
        await asyncio.wait({asked}, timeout=_LATE)
    asked.cancel()
    (how,) = await asyncio.gather(asked, return_exceptions=True)
    if answered and how is None:
        prefill.works()
        return
    prefill.fails()
    await drop(prefill, transfer_id, key)  # its decoder may not have asked


async def _end_of(reader: asyncio.StreamReader) -> None:
    """Wait until the other side has closed its connection. What it still sends is of no use."""
    while await reader.read(_PIECE):
        pass


async def _rest(reader: asyncio.StreamReader, backend: Backend) -> bytes:
    """Read on. An engine that dies ends its answer too early, which the client sees by its length or last chunk."""
    try:
        return await reader.read(_PIECE)
    except OSError as error:
        log.warning("the engine at %s has ended its answer too early: %s", backend, error)
        return b""


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
