"""The side that computes the prompt and pushes its KV, layer by layer, into the decoder's memory.

    prefiller = Prefiller(engine, layout, pages=256, tail_bytes=4 * vocabulary)
    while True:
        job = prefiller.next(timeout=60)
        with job:                                  # leaving it waits for the writes, or refuses the request
            for layer in range(layout.layers):
                ... compute ...
                job.push_layer(layer, 0, keys, values)
            job.push_tail(logits)

A push copies into the prefiller's own registered pages and submits them; it does not wait, so that the transfer of a
layer runs while the next one is computed. The source pages are free again once every write has ended here.

Requests arrive on the engine's callback thread and are checked there; jobs belong to the thread that called `next`.
"""

from __future__ import annotations

import functools
import logging
import queue
import time

from fabric_core import FabricError, MrDesc, NetAddr, ProtocolError, Transfer, TransferEngine, WaitTimeout
from fabric_kvcache.job import Arrival, PrefillJob
from fabric_kvcache.layout import KvLayout
from fabric_kvcache.pool import PagePool, PoolExhausted
from fabric_kvcache.protocol import MAX_MESSAGE, MAX_REASON, KvReject, KvRequest, decode, encode

__all__ = ["Prefiller"]

log = logging.getLogger("fabric.kvcache")

_REPLY_TIMEOUT = 5.0  # seconds: how long a refusal may take to be delivered
_KNOWN_POOLS = 1024  # decoders' pools that are remembered


class Prefiller:
    """Takes requests, hands them out as jobs. `max_waiting` bounds the queue; what does not fit is refused."""

    def __init__(
        self,
        engine: TransferEngine,
        layout: KvLayout,
        *,
        pages: int,
        tail_bytes: int,
        max_jobs: int = 8,
        max_waiting: int = 64,
    ) -> None:
        self.engine = engine
        self.layout = layout
        self.pool = PagePool(engine, layout, pages, tail_bytes=tail_bytes, tails=max_jobs, write=False)
        self.malformed = 0  #: messages that were none
        self._waiting: queue.Queue[Arrival] = queue.Queue(max_waiting)
        # One object per pool of a decoder, not per request: an engine keeps what it knows of a descriptor it has used.
        self._descriptor = functools.lru_cache(_KNOWN_POOLS)(MrDesc.from_bytes)
        self._receives = engine.submit_recvs(min(engine.max_message, MAX_MESSAGE), 4, self._on_message)

    # ---- requests (callback thread)

    def _on_message(self, data: bytes) -> None:
        try:
            request = decode(data)
            if not isinstance(request, KvRequest):
                raise ProtocolError("a refusal was sent to a prefiller")
            decoder, desc = NetAddr.from_bytes(request.reply_to), self._descriptor(request.desc)
        except ProtocolError as error:
            self.malformed += 1
            log.warning("a message was ignored: %s", error)
            return
        reason = self._objection(request, desc)
        if reason is None:
            deadline = time.monotonic() + request.timeout_ms / 1000
            try:
                self._waiting.put_nowait(Arrival(request, decoder, desc, deadline))
            except queue.Full:
                reason = f"{self._waiting.maxsize} requests are waiting already"
        if reason is not None:
            self._refuse(decoder, request.request_id, reason)

    def _objection(self, request: KvRequest, desc: MrDesc) -> str | None:
        """Say why a request cannot be served, in a sentence that names both sides' values."""
        if request.layout != self.layout:
            return f"the decoder's KV cache is {request.layout}; the prefiller's is {self.layout}"
        if request.tail_bytes != self.pool.tail_bytes:
            return f"the decoder wants a tail of {request.tail_bytes} bytes, the prefiller's has {self.pool.tail_bytes}"
        wanted = len(request.page_indices)
        if wanted > self.pool.pages:
            return f"the prompt needs {wanted} pages, the prefiller has {self.pool.pages} in all"
        paged = self.layout.pool_bytes(request.pool_pages)
        if request.tail_offset < paged or desc.nbytes < request.tail_offset + request.tail_bytes:
            return (
                f"the decoder's memory of {desc.nbytes} bytes does not hold {paged} bytes of pages "
                f"and then a tail at {request.tail_offset}"
            )
        return None if desc.writable else "the decoder's memory is registered without the right to write"

    def _refuse(self, decoder: NetAddr, request_id: str, reason: str) -> None:
        log.warning("request %s is refused: %s", request_id, reason)

        def sent(transfer: Transfer) -> None:
            if (error := transfer.exception()) is not None:
                log.warning("the refusal of request %s was not delivered: %s", request_id, error)

        message = encode(KvReject(request_id, reason[:MAX_REASON]))
        try:
            self.engine.submit_send(decoder, message, sent, timeout=_REPLY_TIMEOUT)
        except FabricError as error:
            log.warning("the refusal of request %s could not be sent: %s", request_id, error)

    # ---- jobs

    def next(self, timeout: float) -> PrefillJob:
        """Return the next request as a job. Raises WaitTimeout if there is none within `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            try:
                arrival = self._waiting.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise WaitTimeout(f"no request came within {timeout:g} s") from None
            if arrival.deadline <= time.monotonic():
                self._refuse(arrival.decoder, arrival.request.request_id, "its deadline passed while it waited")
                continue
            try:
                # First contact takes its time; have it while the first layer is computed.
                self.engine.add_peer_group([arrival.desc.addr])
                lease = self.pool.lease(len(arrival.request.page_indices))
            except FabricError as error:
                what = "has no room" if isinstance(error, PoolExhausted) else "cannot reach the decoder"
                self._refuse(arrival.decoder, arrival.request.request_id, f"the prefiller {what}: {error}")
                continue
            return PrefillJob(self.engine, arrival, lease, self._refuse)

    def close(self) -> None:
        """Take no more requests. Jobs must have been left."""
        self._receives.close()
        self.pool.close()

    def __enter__(self) -> Prefiller:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
