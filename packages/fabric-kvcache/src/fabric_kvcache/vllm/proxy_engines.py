"""The engines that a proxy knows: whose turn it is, who does not answer, and where the prefillers' ranks are."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from fabric_core import FabricError
from fabric_kvcache.vllm.card import DROP, Card, Drop, fetch
from fabric_kvcache.vllm.proxy_http import Backend, HttpError, Request, ask, status_of

__all__ = ["PrefillBackend", "Turns", "drop", "ready"]

log = logging.getLogger("fabric.kvcache.proxy")

_CARD_TIMEOUT = 5.0  # seconds
_FRESH = 5.0  # seconds: no engine dies and serves again within that time
_PAUSE = 1.0  # seconds: how long an engine whose card cannot be read is left out
_AGAIN = (0.0, 0.25, 1.0, 3.0)  # seconds between attempts to drop a prompt, which may not be known yet

_Engine = TypeVar("_Engine")


@dataclass(slots=True, eq=False)
class PrefillBackend:
    """A prefill engine, and where its card is."""

    at: Backend
    card_at: tuple[str, int]
    card: Card | None = None
    seen: float = 0.0  #: when the card was last known to be right; time.monotonic()
    down: tuple[float, str] = (0.0, "")  #: until when it is not asked again, and why
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  #: one reads the card, the others wait

    def works(self) -> None:
        """A request went well with the card."""
        self.seen = time.monotonic()

    def fails(self) -> None:
        """Something went wrong: when it comes back, it is another one."""
        self.card = None

    async def read(self) -> Card:
        """Return its card, not older than `_FRESH`: an engine that was started anew has another one.

        Raises HttpError: it cannot be read.
        """
        if self.down[1] and self.lock.locked():  # one tries again, the others go elsewhere
            raise HttpError(502, self.down[1])
        async with self.lock:
            now = time.monotonic()
            if self.card is not None and now - self.seen < _FRESH:
                return self.card
            until, why = self.down
            if now < until:
                raise HttpError(502, why)
            try:
                self.card = await asyncio.to_thread(fetch, *self.card_at, _CARD_TIMEOUT)
            except FabricError as error:
                self.card = None
                self.down = (time.monotonic() + _PAUSE, str(error))
                raise HttpError(502, str(error)) from None
            self.seen, self.down = time.monotonic(), (0.0, "")
            return self.card


class Turns(Generic[_Engine]):
    """Engines of one kind, in turn."""

    def __init__(self, engines: Sequence[_Engine]) -> None:
        self._engines = tuple(engines)
        self._next = 0

    def all(self) -> Iterator[_Engine]:
        """Yield each once, beginning with the one whose turn it is."""
        first, self._next = self._next, (self._next + 1) % len(self._engines)
        for number in range(len(self._engines)):
            yield self._engines[(first + number) % len(self._engines)]


async def ready(turns: Turns[PrefillBackend]) -> tuple[PrefillBackend, Card]:
    """Return the next prefill engine whose card can be read. Raises HttpError: none is."""
    why: list[str] = []
    for engine in turns.all():
        try:
            return engine, await engine.read()
        except HttpError as error:
            why.append(str(error))
    raise HttpError(502, "; ".join(why))


async def drop(engine: PrefillBackend, transfer_id: str, key: str) -> None:
    """Tell a prefill engine that nobody will ask for a prompt. It may not have heard of it yet, so it is told again."""
    body = msgspec.json.encode(Drop(transfer_id, key))
    request = Request("POST", DROP, [("Content-Type", "application/json")], b"")
    for pause in _AGAIN:
        await asyncio.sleep(pause)
        try:
            reader, writer = await ask(Backend(*engine.card_at), request, body)
            try:
                octets = await asyncio.wait_for(reader.read(), _CARD_TIMEOUT)
            finally:
                writer.close()
        except (HttpError, OSError, TimeoutError) as error:
            log.info("%s was not told that %s is not wanted any more: %s", engine.at, transfer_id, error)
            return
        if status_of(octets) == 200:
            return
