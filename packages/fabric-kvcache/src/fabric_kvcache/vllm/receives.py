"""The decode side in a worker: asks for prompts, and tells when their blocks are whole, or why they never will be.

    begin(step)    what is to be received from now on, and what is not wanted any more
    poll()         which requests have ended: well, or not

A request ends by its deadline, whatever its prefiller does. Its blocks may still be written to then; `report.unsafe`
says so, and `report.safe` when that is over. The scheduler half keeps them from being used in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fabric_core import FabricError
from fabric_kvcache.decoder import Decoder
from fabric_kvcache.pending import PendingKv
from fabric_kvcache.pool import PoolExhausted
from fabric_kvcache.vllm.caches import Caches
from fabric_kvcache.vllm.card import Card, fetch
from fabric_kvcache.vllm.steps import Load, Report, Step

__all__ = ["Receives"]

log = logging.getLogger("fabric.kvcache.vllm")

_CARD_TIMEOUT = 5.0  # seconds, of one question

Fetch = Callable[[str, int, float], Card]


class _Asked:
    """A card that somebody reads, in a thread of its own."""

    def __init__(self, read: Fetch, host: str, port: int) -> None:
        self.card: Card | None = None
        self.error = ""
        self.began = time.monotonic()
        self._read, self._at = read, (host, port)
        self.thread = threading.Thread(target=self._run, name="fabric-kv-card", daemon=True)
        self.thread.start()

    @property
    def over(self) -> bool:
        return self.card is not None or bool(self.error)

    def is_not(self, engine: str) -> bool:
        """Whether it is known to be of another incarnation than this one; "": any is right."""
        return self.card is not None and engine not in {"", self.card.engine}

    def _run(self) -> None:
        try:
            self.card = self._read(*self._at, _CARD_TIMEOUT)
        except Exception as error:
            self.error = str(error)


@dataclass(slots=True)
class _Prompt:
    load: Load
    deadline: float
    began: float = field(default_factory=time.monotonic)
    pending: PendingKv | None = None
    cancelled: bool = False


class Receives:
    """Of one worker. One thread."""

    def __init__(self, decoder: Decoder, caches: Caches, *, timeout: float, packing: str = "", read: Fetch = fetch):
        self._decoder = decoder
        self._caches = caches
        self._timeout = timeout
        self._packing = packing
        self._read = read
        self._cards: dict[tuple[str, int], _Asked] = {}
        self._prompts: dict[str, _Prompt] = {}
        self._unsafe: dict[str, PendingKv] = {}
        self.report = Report()

    def begin(self, step: Step) -> None:
        for load in step.loads:
            timeout = load.want.timeout or self._timeout
            prompt = self._prompts[load.request_id] = _Prompt(load, time.monotonic() + timeout)
            self._ask(prompt)
        for request_id in step.cancelled:
            found = self._prompts.get(request_id)
            if found is not None:
                found.cancelled = True
                if found.pending is not None:
                    found.pending.cancel()

    def poll(self) -> tuple[set[str], set[str]]:
        """Return (ended, of those: not received). Each request is named once."""
        ended: set[str] = set()
        failed: set[str] = set()
        for prompt in list(self._prompts.values()):
            reason: str | None = None
            if prompt.pending is None:
                reason = self._ask(prompt)
                if prompt.pending is None and not reason:
                    continue
            if prompt.pending is not None:
                if not prompt.pending.done:
                    continue
                reason = self._take(prompt, prompt.pending)
            request_id = prompt.load.request_id
            del self._prompts[request_id]
            ended.add(request_id)
            if reason:
                failed.add(request_id)
                self.report.reasons[request_id] = reason
        for request_id, pending in list(self._unsafe.items()):
            if pending.settled:
                del self._unsafe[request_id]
                self.report.safe[request_id] = self.report.safe.get(request_id, 0) + 1
        return ended, failed

    # ---- one prompt

    def _ask(self, prompt: _Prompt) -> str | None:
        """Ask for it, if it is known of whom. Return why that will never be."""
        load, left = prompt.load, prompt.deadline - time.monotonic()
        if prompt.cancelled:
            return "it was cancelled"
        addresses = load.want.addresses
        if not addresses:
            found = self._card(prompt)
            if isinstance(found, str):
                return found
            if found is None:
                return None if left > 0 else f"{load.want.host}:{load.want.port} did not send its card in time"
            addresses = found.addresses
        if left <= 0:
            return "there was no room to ask for it in time; raise max_num_seqs"
        whole = self._caches.whole(load.total)
        try:
            prompt.pending = self._decoder.submit(
                addresses,
                whole,
                start=min(load.start // self._caches.granule, whole - 1),
                tables=self._caches.tables(load.blocks),
                request_id=load.want.transfer_id,
                timeout=left,
            )
        except PoolExhausted:
            return None  # others end
        except FabricError as error:
            return str(error)
        return None

    def _card(self, prompt: _Prompt) -> Card | str | None:
        """Return the card; why there is none; or None: it is being read."""
        want = prompt.load.want
        where = want.host, want.port
        asked = self._cards.get(where)
        if asked is None or (asked.is_not(want.engine) and asked.began < prompt.began):  # older than the request
            asked = self._cards[where] = _Asked(self._read, *where)
        if not asked.over:
            return None
        if asked.card is None:
            del self._cards[where]
            return asked.error
        if asked.is_not(want.engine):
            return f"the prefiller at {want.host}:{want.port} was started anew, and what it had computed is gone"
        return self._objection(asked.card) or asked.card

    def _objection(self, card: Card) -> str:
        mine = self._caches.granule, self._packing
        if (card.granule, card.packing) == mine:
            return ""
        return (
            f"the prefiller moves {_said(card.granule, card.packing)} and this engine {_said(*mine)}: start both with "
            "the same --block-size, or with pieces='tokens', on processors of one kind"
        )

    def _take(self, prompt: _Prompt, pending: PendingKv) -> str | None:
        """It has ended. Return why it has not arrived."""
        request_id = prompt.load.request_id
        try:
            with pending.wait(0) as kv:  # the blocks are vLLM's: nothing but a slot is given back
                self.report.received[request_id] = (kv.nbytes, kv.writes, time.monotonic() - prompt.began)
            return None
        except FabricError as error:
            if not prompt.cancelled:
                log.warning("request %s (%s) was not received: %s", request_id, prompt.load.want.transfer_id, error)
                self._cards.pop((prompt.load.want.host, prompt.load.want.port), None)  # another one may be there next
            if not pending.settled:
                self._unsafe[request_id] = pending
                self.report.unsafe[request_id] = 1
            unit = self._caches.granule
            return str(error) if unit == 1 else f"{error} (each token named here is a block of {unit})"

    @property
    def waiting(self) -> int:
        """Requests under way, and ended ones whose blocks are not safe yet."""
        return len(self._prompts) + len(self._unsafe)


def _said(granule: int, packing: str) -> str:
    what = "tokens" if granule == 1 else f"blocks of {granule} tokens"
    return f"{what} ({packing})" if packing else what
