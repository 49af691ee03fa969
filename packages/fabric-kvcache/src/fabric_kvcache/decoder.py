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
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from fabric_core import (
    BadRange,
    Cancelled,
    DeadlineExceeded,
    Expectation,
    FabricError,
    NetAddr,
    PeerLost,
    ProtocolError,
    Transfer,
    TransferEngine,
    TransferError,
)
from fabric_core.errors import CODES
from fabric_kvcache.layout import KvLayout
from fabric_kvcache.pool import PageLease, PagePool
from fabric_kvcache.protocol import MAX_REASON, KvReject, KvRequest, decode, encode, indices
from fabric_kvcache.received import ReceivedKv

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Decoder", "KvDamaged", "PendingKv", "PrefillRefused"]

log = logging.getLogger("fabric.kvcache")

DEFAULT_TIMEOUT = 30.0
_REPLY_BYTES = 4 * MAX_REASON + 256  # UTF-8 needs at most four bytes a character
_GRACE = 5.0  # seconds: how much longer than its deadline an expectation may take to say so
_NAMED = 3  # missing pages that an error names; it counts the others


class PrefillRefused(TransferError):
    """The prefiller will not complete the request. The text is its reason."""


class KvDamaged(FabricError):
    """The prefiller notified more than it wrote: all immediates came, but some pages are not, or only partly, there."""


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

        Raises PoolExhausted, or ProtocolError if the request cannot be put into a message.
        """
        lease = self.pool.lease(self.layout.pages_for(len(prompt)))
        imm = self.engine.alloc_imm()
        try:
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
        except BaseException:
            lease.release()  # nobody was told about these pages
            self.engine.free_imm(imm)
            raise
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


class PendingKv:
    """A request under way. Wait for it, or await it; either gives the `ReceivedKv` or raises what went wrong.

    PrefillRefused, PeerLost, DeadlineExceeded (naming what is missing), Cancelled, KvDamaged.
    """

    def __init__(
        self,
        decoder: Decoder,
        prefiller: NetAddr,
        request: KvRequest,
        lease: PageLease,
        expectation: Expectation,
        timeout: float,
    ) -> None:
        self.prefiller = prefiller
        self.request = request
        self._decoder = decoder
        self._lease = lease
        self._expectation = expectation
        self._timeout = timeout
        self._lock = threading.Lock()  # guards the three below
        self._cause: FabricError | None = None  # why the expectation was cancelled, if not by the user
        self._result: ReceivedKv | None = None
        self._error: FabricError | None = None

    @property
    def done(self) -> bool:
        return self._expectation.done

    def wait(self, timeout: float | None = None) -> ReceivedKv:
        """Block until everything has arrived. None: as long as the request's own timeout. Raises WaitTimeout too."""
        if self._result is None and self._error is None:
            try:
                self._expectation.wait(self._timeout + _GRACE if timeout is None else timeout)
            except TransferError:
                pass
        return self._conclude()

    def __await__(self) -> Generator[Any, None, ReceivedKv]:
        try:
            yield from self._expectation.__await__()
        except TransferError:
            pass
        return self._conclude()

    def cancel(self) -> None:
        """Give up. The pages are quarantined: the prefiller is not asked, and may still be writing."""
        self._expectation.cancel()

    def _sent(self, transfer: Transfer) -> None:
        error = transfer.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, cause: FabricError) -> None:
        with self._lock:
            if self._cause is None:
                self._cause = cause
        self._expectation.cancel()

    def _conclude(self) -> ReceivedKv:
        with self._lock:
            if self._result is None and self._error is None:
                self._error = self._end(self._expectation.exception())
                self._decoder._forget(self.request.request_id)
                if self._error is None:
                    self._result = ReceivedKv(self._decoder.layout, self._lease, self.request)
            if self._error is not None:
                raise self._error
            assert self._result is not None
            return self._result

    def _end(self, ended: FabricError | None) -> FabricError | None:
        """Decide the outcome and what becomes of the pages."""
        surplus = self._decoder.engine.free_imm(self.request.imm)
        peer = str(self.prefiller)
        if ended is None:
            missing = self._missing() if self._decoder.verify else ""
            if not missing and not surplus:
                return None
            self._lease.quarantine()
            return KvDamaged(
                f"the prefiller {peer} raised the immediate {self.request.writes + surplus} times, as often as "
                f"{self.request.writes} were expected; {missing or 'something was written twice'}"
            )
        cause = self._cause if isinstance(ended, Cancelled) and self._cause is not None else ended
        if isinstance(cause, PrefillRefused):
            self._lease.release()
            return cause
        missing = self._missing() if self._decoder.verify else ""
        self._lease.quarantine()
        if isinstance(cause, DeadlineExceeded):
            text = f"the KV of {len(self.request.tokens)} tokens did not arrive within {self._timeout:g} s"
            cure = "raise the timeout if the prefiller is only slow; else look into its log"
            return DeadlineExceeded(
                f"{text}; {missing or 'all pages are there, but not all immediates'}" if self._decoder.verify else text,
                peer=peer,
                op="prefill",
                code=cause.code,
                cure=cure,
            )
        if isinstance(cause, PeerLost):
            known = CODES.get(cause.code or "")
            text = f"{cause.reason or (known.meaning if known else 'it is gone')}, before all KV had arrived"
            return type(cause)(
                f"{text}; {missing}" if missing else text, peer=peer, nic=cause.nic, op="prefill", code=cause.code
            )
        return cause

    def _missing(self) -> str:
        """Name the pages that hold poison; "" if there are none."""
        pages, tail = self._lease.missing(), self._lease.tail_missing()
        total = self.request.writes - 1
        if len(pages) == total:
            return f"none of {total} pages has arrived"
        parts = []
        if pages:
            named = ", ".join(str(page) for page in pages[:_NAMED])
            more = f" and {len(pages) - _NAMED} more" if len(pages) > _NAMED else ""
            parts.append(f"{len(pages)} of {total} pages missing: {named}{more}")
        if tail:
            parts.append("the tail is missing")
        return "; ".join(parts)
