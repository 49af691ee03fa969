"""One request at a prefill rank: what was pushed to which decoder ranks, what is under way, and how it ends."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_core import BadRange, FabricError, MrHandle, StaleHandle, WaitTimeout
from fabric_kvcache.ahead import PreparedWatch
from fabric_kvcache.arguments import number
from fabric_kvcache.cache import show_layers
from fabric_kvcache.hook import LayerHook
from fabric_kvcache.layout import check_fit, pack
from fabric_kvcache.ledger import Ledger
from fabric_kvcache.pool import PageLease
from fabric_kvcache.protocol import SEAL
from fabric_kvcache.sending import Push, Sender
from fabric_kvcache.steps import Step, Steps, same_pages
from fabric_kvcache.tables import Tables, checked
from fabric_kvcache.target import How, Target
from fabric_kvcache.watcher import CalledWatch, LayerWatch, Part

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from fabric_kvcache.prefiller import Prefiller

__all__ = ["TAIL", "PrefillJob", "Push"]

log = logging.getLogger("fabric.kvcache")

TAIL = -1  #: stands for the tail where a layer's number is expected
_LOOK = 0.05  # seconds: how soon it is noticed that nobody waits for the layers that are still to come
_GRACE = 5.0  # seconds: how much longer than its own deadline a write may take to end


class PrefillJob:
    """One request being served. A context manager: leaving it normally is `finish`, by an exception `abandon`.

    Pushes may come from several threads. A decoder rank that cancels, fails or is lost is not written to any more; when
    none is left, the next push raises its error.
    """

    def __init__(self, prefiller: Prefiller, targets: list[Target], lease: PageLease | None, slot: int) -> None:
        first = targets[0]
        self.request = first.request
        self.decoder = first.session.address
        self.decoders = [target.session.address for target in targets]
        self.tokens = first.request.tokens  #: the prompt; empty if the decoder sent only its length
        self.total = first.request.total
        self.start = min(target.request.start for target in targets)  #: tokens before it are wanted by nobody
        self.layers = tuple(sorted({layer for target in targets for layer in target.plan.layers}))
        self.pushes: list[Push] = []
        self._p = prefiller
        self._targets = targets
        self._lease = lease
        self._tables: Tables | None = lease.tables if lease is not None else None
        self._slot = slot
        self._lock = threading.RLock()  # guards what was pushed; a seal must not overtake a push
        self._ledger = Ledger(self.layers, self.start, self.total, tail=any(target.head.tail for target in targets))
        self._padded = lease is not None and all(same_pages(target) for target in targets)
        self._watches: list[LayerWatch] = []
        self._leaving = False
        self._left = False
        self._sender = Sender(prefiller)
        self._steps = Steps(prefiller.shard, targets, self._sender, self.total)

    @property
    def tables(self) -> Tables:
        """This rank's pages of the request, for each group: where its KV is to be before a `push`."""
        if self._tables is None:
            raise BadRange("this prefiller has a memory of your own: say which pages hold the request by use(tables)")
        return self._tables

    def use(self, tables: Sequence[Any], *, upto: int | None = None, moved: bool = False) -> None:
        """Say which pages of the prefiller's memory hold the request, one list per group, from token 0 on.

        For a `Prefiller` with a memory of your own; the pages must stay as they are until the job was left.

        Args:
            upto: they reach as far as this token only, because the engine hands out pages chunk by chunk: call it
                again with longer tables before a push of what lies behind. None: all of the prompt.
            moved: the engine took the pages away and computes the prompt in others; only when the job is `idle`. Hooks
                made before name the old pages: make them anew.

        Raises BadRange for tables that do not fit, for other pages than before that were not `moved`, and for `moved`
        ones while a watch has layers left.
        """
        if self._lease is not None:
            raise BadRange("this prefiller has its own pages, which the job holds already")
        end = self.total if upto is None else number("upto", upto, 1, self.total)
        found = checked(self._p.shard, tables, min(self.start, end), end)
        with self._lock:
            before = self._tables
            both = [(a[: len(b)], b[: len(a)]) for a, b in zip(before or (), found, strict=False)]
            if not moved and any(not np.array_equal(a, b) for a, b in both):
                raise BadRange(
                    "use(tables) a second time, with other pages: name all pages of the request once, before a push, "
                    "or those of its first tokens (upto=) and later more"
                )
            if moved and any(watch.waiting for watch in self._watches):
                raise BadRange(
                    "use(moved=True) while a watch has layers left, which it would push from the old pages: close it, "
                    "and make another one afterwards"
                )
            if moved or before is None or sum(map(len, found)) > sum(map(len, before)):
                self._tables = found
            if moved:  # what was worked out for a chunk names the old pages
                self._steps = Steps(self._p.shard, self._targets, self._sender, self.total)

    @property
    def whole(self) -> bool:
        """Whether everything that the decoders want was pushed."""
        with self._lock:
            return self._ledger.whole

    @property
    def idle(self) -> bool:
        """Whether no write of it is under way. It does not wait, and once it is `whole`, neither does `finish` then."""
        return not any(target.busy for target in self._targets)

    # ---- pushing

    def push_layer(self, layer: int, first_token: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Copy a layer's KV of the tokens from `first_token` on into this rank's pages, and send it.

        keys and values are `[head, token, dim]`, of the heads of this rank. Chunks may end anywhere.
        Raises BadRange, the error of a push that has failed, Cancelled, DeadlineExceeded, or StaleHandle: the job was
        left. Then nothing was copied either.
        """
        began = time.perf_counter()
        end = first_token + keys.shape[1]
        self._check(layer, first_token, end)
        pool, size = self._p.pool, self._p.shard.layout.groups[0].page_tokens  # type: ignore[union-attr]
        view = pool.view[self._p.shard.layers(0).index(layer)]
        pages = self.tables[0][first_token // size : -(-end // size)]
        check_fit(view, pages, keys, values, first_token % size)
        with (
            self._lock
        ):  # the pages are this job's for as long as it was not left, and these tokens are pushed by nobody
            step = self._step(layer, first_token, end, padded=self._padded)
            self._reserve(step)
            pack(view, pages, keys, values, first_token % size)
            if self._padded and end == self.total:
                view[pages[-1], :, :, self.total % size or size :] = 0
            if step is not None:
                self._submit(step, began)

    def push(self, layer: int, first: int, end: int) -> None:
        """Send a layer's KV of tokens `first` to `end`, straight from this rank's pages, where it lies already."""
        began = time.perf_counter()
        self._check(layer, first, end)
        self._padded = False  # what follows the prompt in its last page is not known to be nobody else's
        step = self._step(layer, first, end, padded=False)
        if step is not None:
            self._post(step, began)

    def push_all(self, first: int, end: int) -> None:
        """Send all layers of tokens that are there already: a prefix that this side had in its cache."""
        for layer in self.layers:
            self.push(layer, first, end)

    def hook(self, first: int, end: int) -> LayerHook:
        """Return what a model calls with the number of each layer that is done, for a chunk of tokens.

        Make it when the chunk begins: what its layers write is worked out here, not when they are ready.
        Raises BadRange for tokens that are not of the prompt.
        """
        self._check_tokens(first, end)
        self._padded = False
        steps: dict[int, Step] = {}
        if self._tables is not None:  # else they are known by the time that a layer is ready
            for layer in self.layers:
                step = self._step(layer, first, end, padded=False)
                if step is not None:
                    steps[layer] = step
        return LayerHook(steps, lambda layer: self._step(layer, first, end, padded=False), self._post)

    def watch(self, chunks: Sequence[tuple[int, int]], layers: Sequence[int] | None = None) -> LayerWatch:
        """Return a word that whoever computes bumps after each layer of each chunk, in that order; pushes follow.

        For a GPU: bump `watch.ptr` (a kernel's addition, or `engine.stream_signal`), also within a CUDA graph.
        All pushes are prepared here, and submitted by the engine without Python. Where that cannot be, because pages
        are not named yet or parts overlap, a callback pushes each when it is due. Until `watch.close()` nobody else
        may push what was prepared. Raises BadRange for layers and tokens that are not of the prompt.
        """
        parts = [(layer, *chunk) for chunk in chunks for layer in (self.layers if layers is None else layers)]
        for layer, first, end in parts:
            self._check(layer, first, end)
        watch = self._prepared(parts)
        if watch is None:
            hooks = {chunk: self.hook(*chunk) for chunk in dict.fromkeys(tuple(chunk) for chunk in chunks)}
            watch = CalledWatch(self._p.engine, parts, lambda layer, first, end: hooks[first, end](layer))
        self._watches.append(watch)
        return watch

    def _prepared(self, parts: list[Part]) -> LayerWatch | None:
        """None: not all of it can be prepared now; a push says why, if it still cannot be then."""
        self._padded = False
        if self._tables is None or not parts:
            return None
        try:
            steps = [self._step(layer, first, end, padded=False) for layer, first, end in parts]
        except FabricError:  # its pages are not known yet
            return None
        claims = [part for part, step in zip(parts, steps, strict=True) if step is not None]
        with self._lock:
            if self._leaving or not self._ledger.claim(claims):
                return None
            try:
                return PreparedWatch(
                    self._p.engine, parts, steps, self._sender, self._lock, self._pushed_ahead, self._ledger.unclaim
                )
            except FabricError:
                self._ledger.unclaim(claims)
                return None

    def _pushed_ahead(self, step: Step, whole: bool, missing: int) -> None:
        """The engine has submitted a step that a word told of; with the lock held."""
        if whole:
            self._ledger.redeem(step.layer, step.first, step.end)
        self._submitted(step, missing)

    def push_tail(self, data: Any) -> None:
        """Send the tail (last logits, say), once: a buffer of exactly its size, or (MrHandle, offset) in yours."""
        began = time.perf_counter()
        nbytes = self._p.tail_bytes
        if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], MrHandle):
            source: tuple[MrHandle, int] = data
            octets = None
        else:
            octets = np.frombuffer(data, dtype=np.uint8) if memoryview(data).nbytes else np.empty(0, np.uint8)
            source = self._p.tails.handle, self._p.tails.offset(self._slot)
        with self._lock:
            self._not_left()
            self._alive()
            if octets is not None and len(octets) != nbytes:
                raise BadRange(f"a tail of {len(octets)} bytes, expected one of {nbytes}, once")
            if not self._ledger.tail_left and any(target.head.tail for target in self._targets):
                raise BadRange(f"a tail of {nbytes} bytes, a second time: it is pushed once")
            self._ledger.tail_left = False
            if octets is not None and nbytes:
                self._p.tails.at(self._slot)[:nbytes] = octets
            wanted = [target for target in self._targets if target.head.tail]
            push = Push(TAIL, len(wanted), nbytes * len(wanted), began, time.perf_counter(), left=len(wanted))
            ended = functools.partial(self._sender.ended, push)
            for target in wanted:
                if not target.write(1, nbytes, (self._sender.tail(target, source, nbytes, target.on_done(ended)),)):
                    ended()
            if not wanted:
                push.done = time.perf_counter()
            push.submitted = time.perf_counter()
            self.pushes.append(push)
            self._seal_if_whole()
            self._alive()

    def _check(self, layer: int, first: int, end: int) -> None:
        if layer not in self._p.shard.layout.stage_layers(self._p.shard.pp):
            stage = show_layers(tuple(self._p.shard.layout.stage_layers(self._p.shard.pp)))
            raise BadRange(f"layer {layer}: this rank has layers {stage}")
        self._check_tokens(first, end)

    def _check_tokens(self, first: int, end: int) -> None:
        if not 0 <= first < end <= self.total:
            raise BadRange(f"tokens {first}..{end} of {self.total}: must be 0 <= first < end <= total")

    def _step(self, layer: int, first: int, end: int, *, padded: bool) -> Step | None:
        """None: nobody wants this layer of this rank, another one sends it. Raises BadRange for one of no rank."""
        if layer not in self._ledger:
            every = sorted({number for group in self._p.shard.layout.groups for number in group.layer_numbers})
            if layer not in every:
                raise BadRange(f"layer {layer!r}: the model has layers {show_layers(tuple(every))}")
            return None
        return self._steps.make(layer, first, end, self.tables, padded=padded)

    def _post(self, step: Step, began: float) -> None:
        """Submit a layer that is ready."""
        with self._lock:
            self._reserve(step)
            self._submit(step, began)

    def _reserve(self, step: Step | None) -> None:
        """Take these tokens on; with the lock held. Raises why they may not be pushed, and nothing has changed."""
        self._not_left()
        self._alive()
        if step is not None:
            self._ledger.add(step.layer, step.first, step.end)

    def _not_left(self) -> None:
        if self._leaving:
            raise StaleHandle(f"the job of request {self.request.request_id} was left: its pages may be another one's")

    def _submit(self, step: Step, began: float) -> None:
        """Submit what was reserved; with the lock held. What can wait comes after the submits."""
        push = step.push
        push.began, push.submitting = began, time.perf_counter()
        made = 0
        for batch in step.batches:
            made += batch.target.write(batch.writes, batch.nbytes, batch.submits)
        push.submitted = time.perf_counter()
        self._submitted(step, step.transfers - made)

    def _submitted(self, step: Step, missing: int) -> None:
        push = step.push
        if not step.transfers:
            push.done = push.submitted
        self.pushes.append(push)
        if self._ledger.close(step.layer):
            self._seal_if_whole()
        if missing:  # a decoder rank wants no more
            self._sender.ended(push, missing)
            self._alive()

    def _seal_if_whole(self) -> None:
        """Once everything was submitted, tell each decoder rank how many writes that was."""
        if not self._ledger.whole:
            return
        for target in self._targets:
            if target.open and not target.sealed:
                slot = self._p.seals.take()
                seal = SEAL.pack(target.request.epoch, target.writes, target.nbytes)
                self._p.seals.at(slot)[:] = np.frombuffer(seal, np.uint8)
                give = functools.partial(self._p.seals.give, slot)
                if not target.write(0, 0, (self._sender.seal(target, slot, target.on_done(give)),), seal=True):
                    give()

    # ---- the decoders

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants it any more: what is still computed is computed for nothing."""
        return not any(target.open for target in self._targets)

    def _alive(self) -> None:
        """Raise why there is nobody left to write to."""
        now = time.monotonic()
        wanted = False
        for target in self._targets:
            if target.open and target.deadline > now:
                wanted = True
            elif target.open:
                target.expire()
        if not wanted:
            for target in self._targets:
                if target.error is not None:
                    raise target.error

    # ---- ending

    def finish(self) -> None:
        """Wait until every write has ended. Raises if something was not pushed, or a decoder rank did not get it all.

        On an error each decoder rank is told, once no write to it is under way any more.
        """
        last = max(target.deadline for target in self._targets)
        for watch in self._watches:
            while not watch.wait_all(_LOOK) and watch.waiting and not self.cancelled and time.monotonic() < last:
                pass
        what = self._ledger.unpushed() if not self.cancelled else ""
        if what:
            reason = f"{what} of request {self.request.request_id} was never pushed"
            refused = next((watch.error for watch in self._watches if watch.error is not None), None)
            if refused is not None:
                reason += f", because a push that follows a watch was refused: {refused}"
            self.abandon(reason)
            raise FabricError(reason) from refused
        if not self._settle():
            raise WaitTimeout(f"a write of request {self.request.request_id} does not end")
        for target in self._targets:
            if target.error is not None:
                raise target.error

    def abandon(self, reason: str, how: How = "failed") -> None:
        """End the job without completing it: cancel what is under way, then tell the decoders."""
        self.stop(reason, how)
        self._settle()

    def stop(self, reason: str, how: How = "failed") -> None:
        """The first half of `abandon`, which does not wait: call that one too, once the job is `idle`."""
        for target in self._targets:
            self._p._stop(target, how, reason)

    def _settle(self) -> bool:
        """Wait for the end of all writes, good or bad, and give the source pages back. False: one did not end."""
        if self._left:
            return True
        with self._lock:  # a push that is under way ends before; none begins any more
            self._leaving = True
        for watch in self._watches:
            watch.close()
        end = max([time.monotonic(), *(target.deadline for target in self._targets)]) + _GRACE
        self._sender.settle(self._targets, self.pushes, end)
        self._left = True
        if any(target.busy for target in self._targets):
            log.error("request %s: a write does not end; its pages stay unused", self.request.request_id)
            if self._lease is not None:
                self._lease.quarantine()
            return False
        if self._lease is not None:
            self._lease.release()
        self._p.tails.give(self._slot)
        return True

    def __del__(self) -> None:
        if not getattr(self, "_left", True):  # nothing is given back here: this may be any thread, with any lock held
            log.error("the job of request %s was dropped and never left: its pages stay taken", self.request.request_id)

    def __enter__(self) -> PrefillJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.finish()
        elif not self._left:
            self.abandon(str(error) if isinstance(error, FabricError) else f"the model failed: {error!r}")
