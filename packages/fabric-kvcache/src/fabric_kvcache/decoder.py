"""The side that owns the pages: it asks a prefiller for a prompt's KV, and starts only when all of it has arrived.

    decoder = Decoder(engine, layout, pages=1024, tail_bytes=4 * vocabulary)
    with decoder.submit(prefiller, prompt, timeout=30).wait() as kv:      # or: async, `await decoder.submit(...)`
        keys, values = kv.layer(0)
        ...

One expectation stands for the whole transfer: pages x layers + 1 immediates, in any order. Pages are filled with NaN
before the request is sent, and looked through afterwards, so that a page which was not written is found and named
instead of being decoded (`verify=False` leaves that out).

Pages are never given to another request while a write of this one may land: they come back after a complete transfer,
or after a refusal (which a prefiller sends only when its writes have ended), and are quarantined in every other case.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from fabric_core import BadRange, FabricError, NetAddr, ProtocolError, TransferEngine
from fabric_kvcache.layout import KvLayout
from fabric_kvcache.pending import PendingKv, PrefillRefused
from fabric_kvcache.pool import PagePool
from fabric_kvcache.protocol import MAX_REASON, KvReject, KvRequest, decode, encode, indices

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Decoder"]

log = logging.getLogger("fabric.kvcache")

DEFAULT_TIMEOUT = 30.0  # seconds
_REPLY_BYTES = 4 * MAX_REASON + 256  # UTF-8 needs at most four bytes a character


class Decoder:
    """Asks prefillers for KV. Any number of requests at a time, each to a prefiller of its own; any thread.

    `pages`: of each layer, for all requests together. `seed`: hand pages out in an order drawn from it, for tests.
    """

    def __init__(
        self,
        engine: TransferEngine,
        layout: KvLayout,
        *,
        pages: int,
        tail_bytes: int,
        max_requests: int = 8,
        verify: bool = True,
        seed: int | None = None,
    ) -> None:
        self.engine = engine
        self.layout = layout
        self.verify = verify
        self.pool = PagePool(engine, layout, pages, tail_bytes=tail_bytes, tails=max_requests, write=True, seed=seed)
        self._lock = threading.Lock()  # guards the one below
        self._pending: dict[str, PendingKv] = {}
        self._receives = engine.submit_recvs(min(engine.max_message, _REPLY_BYTES), 4, self._on_message)

    def submit(
        self, prefiller: NetAddr, prompt: Sequence[int] | NDArray[Any], *, timeout: float = DEFAULT_TIMEOUT
    ) -> PendingKv:
        """Ask for the KV of a prompt (token ids). `timeout` bounds the whole of it, prefill included.

        Raises PoolExhausted, or BadRange if the request is empty or does not fit into a message.
        """
        if len(prompt) == 0:
            raise BadRange("a prompt without a token has no KV")
        with ExitStack() as undo:  # until somebody is told about the pages
            lease = self.pool.lease(self.layout.pages_for(len(prompt)))
            undo.callback(lease.release)
            imm = self.engine.alloc_imm()
            undo.callback(self.engine.free_imm, imm)
            if self.verify:
                lease.poison()
            request = KvRequest(
                request_id=secrets.token_hex(8),
                layout=self.layout,
                reply_to=self.engine.address.to_bytes(),
                desc=self.pool.desc.to_bytes(),
                pool_pages=self.pool.pages,
                pages=indices(lease.pages),
                tail_offset=lease.tail_offset,
                tail_bytes=self.pool.tail_bytes,
                imm=imm,
                timeout_ms=max(1, int(timeout * 1000)),
                prompt=indices(prompt),
            )
            message = encode(request)
            if len(message) > self.engine.max_message:
                raise BadRange(
                    f"a request for {len(prompt)} tokens takes a message of {len(message)} bytes; backend "
                    f"{self.engine.backend} carries at most {self.engine.max_message}"
                )
            # The expectation comes first: it cannot miss an immediate, but it can miss the loss of the peer.
            expectation = self.engine.expect_imm_count(imm, request.writes, timeout=timeout, peers=[prefiller])
            undo.pop_all()
        pending = PendingKv(self, prefiller, request, lease, expectation, timeout)
        with self._lock:
            self._pending[request.request_id] = pending
        try:
            self.engine.submit_send(prefiller, message, pending._sent, timeout=timeout)
        except FabricError as error:
            pending._fail(error)
        return pending

    def _on_message(self, data: bytes) -> None:
        try:
            message = decode(data)
            if not isinstance(message, KvReject):
                raise ProtocolError("a request was sent to a decoder")
        except ProtocolError as error:
            log.warning("a message was ignored: %s", error)
            return
        with self._lock:
            pending = self._pending.get(message.request_id)
        if pending is None:
            log.info("a refusal of request %s came after its end", message.request_id)
        else:
            pending._fail(PrefillRefused(message.reason, peer=str(pending.prefiller), op="prefill"))

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._pending.pop(request_id, None)

    def close(self) -> None:
        """Cancel what is pending, and end the registration: nothing can be written from here on. Idempotent."""
        with self._lock:
            pending = list(self._pending.values())
        for one in pending:
            one.cancel()
            try:
                one.wait()
            except FabricError:
                pass
        self._receives.close()
        self.pool.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
