"""One request at the prefiller: what was pushed, what is under way, and how it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_core import (
    BadRange,
    DeadlineExceeded,
    FabricError,
    MrDesc,
    NetAddr,
    Pages,
    Transfer,
    TransferEngine,
    TransferError,
    WaitTimeout,
)
from fabric_kvcache.layout import pack
from fabric_kvcache.pool import PageLease
from fabric_kvcache.protocol import KvRequest

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

__all__ = ["TAIL", "Arrival", "PrefillJob", "Push"]

log = logging.getLogger("fabric.kvcache")

TAIL = -1  #: stands for the tail where a layer's number is expected
_GRACE = 5.0  # seconds: how much longer than its own deadline a write may take to end


@dataclass(slots=True)
class Push:
    """One submitted piece, and when: times of `time.perf_counter()`. `done` is 0.0 until its end was seen."""

    layer: int  #: or TAIL
    writes: int
    nbytes: int
    began: float  #: copying into the source pages
    submitting: float
    submitted: float = 0.0  #: the submit has returned
    done: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that was checked, and waits for its turn."""

    request: KvRequest
    decoder: NetAddr
    desc: MrDesc
    deadline: float  #: of time.monotonic()


class PrefillJob:
    """One request being served. A context manager: leaving it normally is `finish`, by an exception `abandon`.

    `refuse(decoder, request_id, reason)` tells the decoder; it is called at most once, after the last write has ended.
    """

    def __init__(
        self,
        engine: TransferEngine,
        arrival: Arrival,
        lease: PageLease,
        refuse: Callable[[NetAddr, str, str], None],
    ) -> None:
        self.request = arrival.request
        self.decoder = arrival.decoder
        self.tokens = arrival.request.tokens  #: the prompt
        self.pushes: list[Push] = []
        self._engine = engine
        self._refuse = refuse
        self._layout = arrival.request.layout
        self._lease = lease
        self._desc = arrival.desc
        self._deadline = arrival.deadline
        self._transfers: list[Transfer] = []
        self._pushed = np.zeros((self._layout.layers, len(lease.pages)), dtype=bool)
        self._tail_pushed = False
        self._changed = threading.Condition()  # guards the two below, which the callback thread writes
        self._ended = 0
        self._failed: TransferError | None = None

    # ---- pushing

    def push_layer(self, layer: int, first_token: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Send a layer's KV of the tokens from `first_token` on: keys and values are `[head, token, dim]`.

        Prompts may come in chunks: a chunk begins at a page, and ends at one unless it is the last.
        Raises the error of an earlier push that has failed, or DeadlineExceeded.
        """
        began = time.perf_counter()
        timeout = self._remaining()
        first, last = self._page_range(layer, first_token, first_token + keys.shape[1])
        source, target = self._lease.pages[first:last], self.request.page_indices[first:last]
        pool = self._lease.pool
        pack(pool.view[layer], source, keys, values)
        self._pushed[layer, first:last] = True
        size = self._layout.page_bytes
        push = Push(layer, len(source), len(source) * size, began, time.perf_counter())
        transfer = self._engine.submit_paged_writes(
            size,
            self.request.imm,
            (pool.handle, Pages(source, size, self._layout.layer_offset(layer, pool.pages))),
            (self._desc, Pages(target, size, self._layout.layer_offset(layer, self.request.pool_pages))),
            self._when_done(push),
            timeout=timeout,
        )
        self._submitted(push, transfer)

    def push_tail(self, data: Any) -> None:
        """Send the tail (last logits, say): a buffer of exactly the tail's size. Once."""
        began = time.perf_counter()
        timeout = self._remaining()
        octets = np.frombuffer(data, dtype=np.uint8)
        if self._tail_pushed or len(octets) != self.request.tail_bytes:
            raise BadRange(f"a tail of {len(octets)} bytes, expected one of {self.request.tail_bytes}, once")
        self._lease.tail[:] = octets
        self._tail_pushed = True
        push = Push(TAIL, 1, len(octets), began, time.perf_counter())
        transfer = self._engine.submit_single_write(
            len(octets),
            self.request.imm,
            (self._lease.pool.handle, self._lease.tail_offset),
            (self._desc, self.request.tail_offset),
            self._when_done(push),
            timeout=timeout,
        )
        self._submitted(push, transfer)

    def _page_range(self, layer: int, first: int, end: int) -> tuple[int, int]:
        """Return which of the request's pages these tokens fill, or raise BadRange."""
        size, total = self._layout.page_tokens, len(self.tokens)
        if not 0 <= layer < self._layout.layers:
            raise BadRange(f"layer {layer} of {self._layout.layers}")
        if first < 0 or first % size or not first < end <= total or (end % size and end != total):
            raise BadRange(
                f"tokens {first}..{end} of {total}: a chunk begins and ends at a multiple of {size}, "
                "or ends with the prompt"
            )
        pages = first // size, self._layout.pages_for(end)
        if self._pushed[layer, slice(*pages)].any():
            raise BadRange(f"layer {layer}, tokens {first}..{end}: pushed before")
        return pages

    def _remaining(self) -> float:
        if self._failed is not None:
            raise self._failed
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"the deadline of request {self.request.request_id} has passed", peer=str(self.decoder), op="prefill"
            )
        return left

    def _submitted(self, push: Push, transfer: Transfer) -> None:
        push.submitted = time.perf_counter()
        self.pushes.append(push)
        self._transfers.append(transfer)

    def _when_done(self, push: Push) -> Callable[[Transfer], None]:
        def done(transfer: Transfer) -> None:
            push.done = time.perf_counter()
            error = transfer.exception()
            with self._changed:
                self._ended += 1
                if isinstance(error, TransferError) and self._failed is None:
                    self._failed = error
                self._changed.notify_all()

        return done

    # ---- ending

    def finish(self) -> None:
        """Wait until every write has ended. Raises if something was not pushed, or a write failed.

        On an error the request is refused, once no write of it is under way any more.
        """
        what = self._unpushed()
        if what:
            reason = f"{what} of request {self.request.request_id} was never pushed"
            self.abandon(reason)
            raise FabricError(reason)
        if not self._settle():
            raise WaitTimeout(f"a write of request {self.request.request_id} does not end")
        if self._failed is not None:
            self._refuse(self.decoder, self.request.request_id, f"a write failed: {self._failed}")
            raise self._failed

    def abandon(self, reason: str) -> None:
        """End the job without completing it: wait for the writes under way, then tell the decoder."""
        if self._settle():
            self._refuse(self.decoder, self.request.request_id, reason)

    def _unpushed(self) -> str:
        if not self._pushed.all():
            layer, page = np.argwhere(~self._pushed)[0]
            return f"page {page} of layer {layer}"
        return "" if self._tail_pushed else "the tail"

    def _settle(self) -> bool:
        """Wait for the end of all writes, good or bad, and give the source pages back. False: one did not end."""
        end = max(self._deadline, time.monotonic()) + _GRACE
        for transfer in self._transfers:
            try:
                transfer.wait(max(0.0, end - time.monotonic()))  # helps the engine along, unlike the condition below
            except WaitTimeout as error:
                log.error("request %s: a write does not end; its pages stay unused: %s", self.request.request_id, error)
                self._lease.quarantine()
                return False
            except TransferError as error:
                with self._changed:
                    self._failed = self._failed or error
        with self._changed:  # the callbacks, for the times they note
            self._changed.wait_for(lambda: self._ended == len(self._transfers), timeout=_GRACE)
        self._lease.release()
        return True

    def __enter__(self) -> PrefillJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.finish()
        elif self._lease.state == "held":
            self.abandon(str(error) if isinstance(error, FabricError) else f"the model failed: {error!r}")
