"""The side that owns the pages: it asks prefillers for a prompt's KV, and starts only when all of it has arrived.

    decoder = Decoder(engine, layout, pages=1024, tail_bytes=4 * vocabulary)
    with decoder.submit(prefiller, prompt, timeout=30).wait() as kv:      # or: async, `await decoder.submit(...)`
        keys, values = kv.layer(0)
        ...

A `Decoder` is one rank. It asks every prefill rank that has something for it, each of which writes straight into its
pages; layouts and degrees of parallelism may differ (plan.py). Pages of memory that the host can read are filled with
NaN before, and looked through afterwards, so that a page which was not written is found and named instead of being
decoded (`verify=False` leaves that out).

Pages are never given to another request while a write of this one may land: see pending.py and ranks.py.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_core import BadRange, ConfigError, DeadlineExceeded, NetAddr, StaleHandle, TransferEngine
from fabric_kvcache import arguments, hub
from fabric_kvcache.cache import CacheLayout
from fabric_kvcache.clock import Clock
from fabric_kvcache.layout import KvLayout
from fabric_kvcache.pairs import seed_of
from fabric_kvcache.pending import PendingKv
from fabric_kvcache.poison import POISON
from fabric_kvcache.pool import PageLease, PagePool, as_layout
from fabric_kvcache.protocol import MAX_TOKENS, SEAL, indices
from fabric_kvcache.ranks import Ranks
from fabric_kvcache.request import Request
from fabric_kvcache.shard import Shard
from fabric_kvcache.slots import SlotPool

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Decoder"]

log = logging.getLogger("fabric.kvcache")

DEFAULT_TIMEOUT = 30.0  # seconds
_DAY = 86_400.0  # seconds
_CLOSED = "the decoder is closed: it asks for nothing any more"

Address = NetAddr | str


class Decoder:
    """One decoder rank. Any number of requests at a time; any thread.

    Args:
        layout: of this instance's cache; a `KvLayout` where one rank holds all heads in pages of this package.
        tp, pp: this rank.
        pages: of each layer, for all requests together; one number, or one for each group.
        memory, bases: the pools' memory, and where in it each group's pool begins; None: memory of its own.
        tail_bytes: what comes with each request beside the pages (logits, hidden state, sampler state).
        max_requests: at a time, received ones that were not released included.
        max_sources: prefill ranks that one request is asked of.
        verify: fill pages with NaN and look through them; None: if the memory is its own.
        confirm_timeout: seconds a prefiller has to confirm a cancel before its right to write is revoked.
        seed: hand pages out in an order drawn from it, for tests.
        instance: a name that all ranks of this decode instance have, and no other instance: a request is known by it
            and its id. None: a random one for an instance of one rank, else "".

    Raises ConfigError, naming the value.
    """

    def __init__(
        self,
        engine: TransferEngine,
        layout: KvLayout | CacheLayout,
        *,
        tp: int = 0,
        pp: int = 0,
        pages: int | tuple[int, ...],
        memory: Any = None,
        bases: tuple[int, ...] = (),
        tail_bytes: int = 0,
        max_requests: int = 64,
        max_sources: int = 16,
        verify: bool | None = None,
        confirm_timeout: float = 10.0,
        seed: int | None = None,
        instance: str | None = None,
    ) -> None:
        if max_requests < 1 or max_sources < 1 or not 0 < confirm_timeout <= _DAY or tail_bytes < 0:
            raise ConfigError(
                f"max_requests={max_requests}, max_sources={max_sources}, confirm_timeout={confirm_timeout}, "
                f"tail_bytes={tail_bytes}: the first three must be above 0 (a time at most a day), the last 0 or more"
            )
        if instance is not None:
            try:
                arguments.name("instance", instance, least=0)
            except BadRange as error:
                raise ConfigError(str(error)) from None
        self.engine = engine
        self.layout = layout
        self.shard = Shard(as_layout(layout), tp=tp, pp=pp, pages=pages, bases=bases)
        self.tail_bytes = tail_bytes
        self.max_sources = max_sources
        self.confirm_timeout = confirm_timeout
        self.verify = memory is None if verify is None else verify
        alone = self.shard.layout.tp * self.shard.layout.pp == 1
        self.instance = instance if instance is not None else secrets.token_hex(8) if alone else ""
        self.clock = Clock("fabric-kv-clock")
        self._epochs = itertools.count(1)
        self._lock = threading.Lock()  # guards the two below
        self._closed = False
        self._pending: dict[int, PendingKv] = {}  # by epoch; also ended ones, until they have settled
        with ExitStack() as undo:
            self.pool = PagePool(engine, self.shard, memory=memory, write=True, seed=seed)
            undo.callback(self.pool.close)
            if self.verify:
                _ = self.pool.octets
            size = SEAL.size * max_sources + tail_bytes
            self.slots = SlotPool(engine, max_requests, size, write=True, what="requests")
            undo.callback(self.slots.close)
            self.ranks = Ranks(self)
            self._hear = self.ranks.hear
            self._hub = hub.join(engine, self._hear)  # held: see hub.py
            undo.pop_all()

    # ---- asking

    def submit(
        self,
        prefiller: Address | Iterable[Address],
        prompt: Sequence[int] | NDArray[Any] | int,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        start: int = 0,
        tables: Sequence[Any] | None = None,
        request_id: str | None = None,
        seed: int | None = None,
        on_done: Callable[[PendingKv], object] | None = None,
        on_settled: Callable[[PendingKv], object] | None = None,
    ) -> PendingKv:
        """Ask for the KV of a prompt. Returns at once; `timeout` bounds the whole of it, prefill included.

        Args:
            prefiller: all ranks of a prefill instance, in any order; one address if it has one rank.
            prompt: token ids; or only how many, if the prefiller has them from elsewhere (by the request's id).
            start: tokens that this decoder has already; their pages are not written.
            tables: pages to use, one list per group, from token 0 on, in a `memory` of your own; None: free ones of the
                decoder's pool.
            request_id: must be the same at all decoder ranks of a request, and another one for each attempt; None: a
                random one.
            seed: which of several prefill ranks that hold the same bytes sends them; None: from the request's id.
            on_done, on_settled: called with the PendingKv when it has ended, and when no write of it can land any more,
                well or badly: `pending.error` tells which, None if the KV is there.

        Raises:
            PoolExhausted: no room. BadRange: an empty or absurd request, or tables that do not fit. StaleHandle: the
            decoder is closed.
        """
        tokens, total = _prompt(prompt)
        start = arguments.number("start", start, 0, MAX_TOKENS)
        if start >= total:
            raise BadRange(f"start={start} of {total} tokens: must be 0 <= start < total <= {MAX_TOKENS}")
        timeout = arguments.seconds("timeout", timeout)
        if not 0 < timeout <= _DAY:
            raise BadRange(f"timeout={timeout!r}: seconds, above 0 and at most a day")
        if tables is not None and self.pool.own:
            raise BadRange(
                "tables name pages of a memory of your own, and this decoder hands out its own pages: leave tables "
                "out, or give it your allocator's memory by Decoder(memory=...)"
            )
        addresses = _addresses(prefiller)
        name = arguments.name("request_id", secrets.token_hex(8) if request_id is None else request_id)
        seed = seed_of(name) if seed is None else arguments.number("seed", seed, 0, (1 << 63) - 1)
        self._check_open()
        with ExitStack() as undo:  # until somebody is told about the pages
            lease = self.pool.lease(total) if tables is None else self.pool.borrow(tables, start, total)
            undo.callback(lease.release)
            slot = self.slots.take()
            undo.callback(self.slots.give, slot)
            imms = []
            for _ in range(2):
                imms.append(self.engine.alloc_imm())
                undo.callback(self.engine.free_imm, imms[-1])
            self.slots.at(slot)[:] = POISON
            if self.verify:
                lease.poison(start, total)
            request = Request(
                request_id=name,
                epoch=next(self._epochs),
                seed=seed,
                start=start,
                total=total,
                tokens=tokens,
                tables=lease.tables,
                tail=self.tail_bytes > 0,
                timeout=timeout,
            )
            ranks = [self.ranks.get(address) for address in addresses]
            pending = PendingKv(self, ranks, request, lease, slot, (imms[0], imms[1]))
            with self._lock:  # a close() either finds it, or is seen here
                if self._closed:
                    raise StaleHandle(_CLOSED)
                self._pending[request.epoch] = pending
            undo.pop_all()
        if on_done is not None:
            pending.add_done_callback(on_done)
        if on_settled is not None:
            pending.add_settled_callback(on_settled)
        if any(rank.greeting for rank in ranks):
            found = weakref.ref(pending)  # a long timeout is no reason to keep what has ended
            self.clock.call(timeout, lambda: self._greeting_over(found()))
        for rank in ranks:
            self.ranks.when_ready(rank, pending._ready)
        return pending

    def _greeting_over(self, pending: PendingKv | None) -> None:
        if pending is None or pending._phase != "greeting":
            return
        error = DeadlineExceeded("no answer to the handshake", code="ETIME")
        pending._fail(error)
        for rank in pending._ranks:
            if rank.greeting:  # the next request greets it anew
                self.ranks.lost(rank, error)

    # ---- for PendingKv and ReceivedKv

    def _seals(self, pending: PendingKv) -> list[tuple[int, int, int]]:
        octets = self.slots.at(pending._slot)[: SEAL.size * len(pending._sources)].tobytes()
        return [(epoch, writes, nbytes) for epoch, writes, nbytes in SEAL.iter_unpack(octets)]

    def _tail(self, slot: int) -> NDArray[np.uint8]:
        return self.slots.at(slot)[SEAL.size * self.max_sources :]

    def _tail_missing(self, slot: int) -> bool:
        return bool((self._tail(slot) == POISON).all())

    def _give(self, lease: PageLease, slot: int) -> None:
        """Give a request's pages and slot back, once."""
        if lease.release():
            self.slots.give(slot)

    def _forget(self, pending: PendingKv) -> None:
        with self._lock:
            self._pending.pop(pending.request.epoch, None)
            last = self._closed and not self._pending
        if last:  # not here: this may be the callback thread
            self.clock.call(0, self._stop_asking)

    def _check_open(self) -> None:
        with self._lock:
            if self._closed:
                raise StaleHandle(_CLOSED)

    def _stop_asking(self) -> None:
        """After close(), once everything has settled, or the engine is closed: nothing is left to hear or to do."""
        hub.leave(self.engine, self._hear)
        self.clock.close()

    @property
    def in_flight(self) -> int:
        """Requests that have not settled: under way, or ended with pages that are not safe yet."""
        with self._lock:
            return len(self._pending)

    def close(self, timeout: float = 5.0) -> None:
        """Cancel what is pending, wait for the confirmations, and end every right to write here. Idempotent.

        A prefiller that stands still may be in the middle of a copy. Requests whose end it does not confirm within
        `timeout` seconds stay `in_flight`: it is asked on in the background while the engine lives, and `on_settled` is
        called when their pages are safe. Nobody may use their pages before.
        """
        limit = arguments.seconds("timeout", timeout)
        with self._lock:
            again, self._closed = self._closed, True
            pending = list(self._pending.values())
        for one in pending:
            one.cancel()
        end = time.monotonic() + (0 if self.engine.closed else limit)
        for one in pending:
            one.wait_settled(max(0.0, end - time.monotonic()))
        if again:
            return
        self.ranks.close()
        self.pool.close()
        self.slots.close()
        left = self.in_flight
        if left:
            log.warning(
                "a decoder has closed with %d requests whose prefillers (%s) have not confirmed their end: their pages "
                "must not be used before on_settled is called%s",
                left,
                ", ".join(sorted({str(one) for each in pending if not each.settled for one in each.prefillers})),
                ", which this closed engine cannot learn any more" if self.engine.closed else "",
            )
        if not left or self.engine.closed:
            self._stop_asking()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _prompt(prompt: Any) -> tuple[NDArray[np.uint32], int]:
    """Return a prompt's tokens, none if only their number was given, and that number."""
    try:
        found = np.asarray(prompt)
    except (TypeError, ValueError, OverflowError):
        found = np.empty((), object)
    if found.ndim == 0:
        return np.empty(0, np.uint32), arguments.number("prompt", prompt, 1, MAX_TOKENS)
    if found.ndim != 1 or not 1 <= len(found) <= MAX_TOKENS:
        raise BadRange(f"a prompt of shape {found.shape}: must be a list of 1 to {MAX_TOKENS} token ids")
    return np.frombuffer(indices(found), dtype="<u4"), len(found)


def _addresses(prefiller: Any) -> list[NetAddr]:
    try:
        given = [prefiller] if isinstance(prefiller, NetAddr | str) else list(prefiller)
    except TypeError:
        given = [prefiller]
    if not given:
        raise BadRange("no prefiller: name all ranks of the instance that is to compute the prompt")
    for one in given:
        if not isinstance(one, NetAddr | str):
            raise BadRange(f"prefiller={one!r}: must be the address of an engine")
    return [NetAddr.parse(one) if isinstance(one, str) else one for one in given]
