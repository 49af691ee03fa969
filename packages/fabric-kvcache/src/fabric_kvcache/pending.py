"""A decoder's request under way: how it ends, and what becomes of its pages."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from fabric_core import (
    Cancelled,
    DeadlineExceeded,
    Expectation,
    FabricError,
    NetAddr,
    PeerLost,
    Transfer,
    TransferError,
)
from fabric_core.errors import CODES
from fabric_kvcache.pool import PageLease
from fabric_kvcache.protocol import KvRequest
from fabric_kvcache.received import ReceivedKv

if TYPE_CHECKING:
    from fabric_kvcache.decoder import Decoder

__all__ = ["KvDamaged", "PendingKv", "PrefillRefused"]

_GRACE = 5.0  # seconds: how much longer than its deadline an expectation may take to say so
_NAMED = 3  # missing pages that an error names; it counts the others


class PrefillRefused(TransferError):
    """The prefiller will not complete the request. The text is its reason."""


class KvDamaged(FabricError):
    """The prefiller notified more than it wrote: all immediates came, but some pages are not, or only partly, there."""


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
