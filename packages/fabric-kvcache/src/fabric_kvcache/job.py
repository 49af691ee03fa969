"""One request at a prefill rank: what was pushed to which decoder ranks, what is under way, and how it ends."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_core import BadRange, DeadlineExceeded, FabricError, MrHandle, WaitTimeout
from fabric_kvcache.cache import AttentionGroup, show_layers
from fabric_kvcache.coverage import Coverage
from fabric_kvcache.layout import pack
from fabric_kvcache.moves import Moves
from fabric_kvcache.plan import Chunk
from fabric_kvcache.pool import PageLease
from fabric_kvcache.protocol import SEAL
from fabric_kvcache.sending import Push, Sender
from fabric_kvcache.tables import Tables, checked
from fabric_kvcache.target import How, Target
from fabric_kvcache.watcher import LayerWatch

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
        self._covered = {layer: Coverage() for layer in self.layers}
        self._open_layers = set(self.layers)
        self._padded = lease is not None and all(_same_pages(target) for target in targets)
        self._moves: dict[tuple[Target, int, int], Moves] = {}
        self._tail = not any(target.head.tail for target in targets)  # pushed, or wanted by nobody
        self._watches: list[LayerWatch] = []
        self._left = False
        self._sender = Sender(prefiller)

    @property
    def tables(self) -> Tables:
        """This rank's pages of the request, for each group: where its KV is to be before a `push`."""
        if self._tables is None:
            raise BadRange("this prefiller has a memory of your own: say which pages hold the request by use(tables)")
        return self._tables

    def use(self, tables: Sequence[Any]) -> None:
        """Say which pages of the prefiller's memory hold the request, one list per group, from token 0 on.

        For a `Prefiller` with a memory of your own; the pages must stay as they are until the job was left.
        """
        if self._lease is not None:
            raise BadRange("this prefiller has its own pages, which the job holds already")
        self._tables = checked(self._p.shard, tables, self.start, self.total)

    # ---- pushing

    def push_layer(self, layer: int, first_token: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Copy a layer's KV of the tokens from `first_token` on into this rank's pages, and send it.

        keys and values are `[head, token, dim]`, of the heads of this rank. Chunks may end anywhere.
        Raises BadRange, the error of a push that has failed, Cancelled, or DeadlineExceeded.
        """
        began = time.perf_counter()
        self._check(layer, first_token, first_token + keys.shape[1])
        pool, size = self._p.pool, self._p.shard.layout.groups[0].page_tokens  # type: ignore[union-attr]
        view = pool.view[self._p.shard.layers(0).index(layer)]
        pages = self.tables[0][first_token // size : -(-(first_token + keys.shape[1]) // size)]
        pack(view, pages, keys, values, first_token % size)
        if self._padded and first_token + keys.shape[1] == self.total:
            view[pages[-1], :, :, self.total % size or size :] = 0
        self._push(layer, first_token, first_token + keys.shape[1], began)

    def push(self, layer: int, first: int, end: int) -> None:
        """Send a layer's KV of tokens `first` to `end`, straight from this rank's pages, where it lies already."""
        began = time.perf_counter()
        self._check(layer, first, end)
        self._padded = False  # what follows the prompt in its last page is not known to be nobody else's
        self._push(layer, first, end, began)

    def push_all(self, first: int, end: int) -> None:
        """Send all layers of tokens that are there already: a prefix that this side had in its cache."""
        for layer in self.layers:
            self.push(layer, first, end)

    def hook(self, first: int, end: int) -> Callable[[int], None]:
        """Return what a model calls with the number of each layer that is done, for a chunk of tokens."""
        return functools.partial(self._hooked, first, end)

    def _hooked(self, first: int, end: int, layer: int) -> None:
        if layer in self._covered:
            self.push(layer, first, end)

    def watch(self, chunks: Sequence[tuple[int, int]], layers: Sequence[int] | None = None) -> LayerWatch:
        """Return a word that whoever computes bumps after each layer of each chunk, in that order; pushes follow.

        For a GPU: bump `watch.ptr` (a kernel's addition, or `engine.stream_signal`), also within a CUDA graph.
        """
        steps = [(layer, *chunk) for chunk in chunks for layer in (self.layers if layers is None else layers)]
        for layer, first, end in steps:
            self._check(layer, first, end)
        watch = LayerWatch(self._p.engine, steps, self.push)
        self._watches.append(watch)
        return watch

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
            self._alive()
            if octets is not None and len(octets) != nbytes:
                raise BadRange(f"a tail of {len(octets)} bytes, expected one of {nbytes}, once")
            if self._tail and any(target.head.tail for target in self._targets):
                raise BadRange(f"a tail of {nbytes} bytes, a second time: it is pushed once")
            self._tail = True
            if octets is not None and nbytes:
                self._p.tails.at(self._slot)[:nbytes] = octets
            wanted = [target for target in self._targets if target.head.tail]
            push = Push(TAIL, len(wanted), nbytes * len(wanted), began, time.perf_counter())
            done = self._sender.when_done(push, len(wanted))
            for target in wanted:
                submit = functools.partial(self._sender.single, target, source, nbytes, target.head.tail_offset, done)
                if not target.write(1, nbytes, submit):
                    done(None)
            push.submitted = time.perf_counter()
            self.pushes.append(push)
            self._seal_if_whole()
            self._alive()

    def _check(self, layer: int, first: int, end: int) -> None:
        if layer not in self._p.shard.layout.stage_layers(self._p.shard.pp):
            stage = show_layers(tuple(self._p.shard.layout.stage_layers(self._p.shard.pp)))
            raise BadRange(f"layer {layer}: this rank has layers {stage}")
        if not 0 <= first < end <= self.total:
            raise BadRange(f"tokens {first}..{end} of {self.total}: must be 0 <= first < end <= total")

    def _push(self, layer: int, first: int, end: int, began: float) -> None:
        with self._lock:
            self._alive()
            if layer not in self._covered:
                return  # nobody wants it of this rank: another one sends it
            self._covered[layer].add(first, end)
            pieces = []
            for target in self._targets:
                a = max(first, target.request.start)
                if a < end and target.open:
                    pieces += [(target, piece) for piece in self._moves_of(target, a, end).at(layer)]
            writes = sum(len(source) for _target, (_length, source, _to) in pieces)
            nbytes = sum(length * len(source) for _target, (length, source, _to) in pieces)
            push = Push(layer, writes, nbytes, began, time.perf_counter())
            done = self._sender.when_done(push, len(pieces))
            for target, piece in pieces:
                count, submit = len(piece[1]), functools.partial(self._sender.pages, target, piece, done)
                if not target.write(count, piece[0] * count, submit):
                    done(None)
            push.submitted = time.perf_counter()
            self.pushes.append(push)
            if self._covered[layer].gap(self.start, self.total) is None:
                self._open_layers.discard(layer)
                self._seal_if_whole()
            self._alive()

    def _moves_of(self, target: Target, first: int, end: int) -> Moves:
        """Return what a chunk writes: worked out at its first layer, the same for the others but for an offset."""
        key = target, first, end
        found = self._moves.get(key)
        if found is None:
            total = self.total
            if self._padded and end == total:  # the last page as a whole, padded with zeros: one write instead of many
                size = self._p.shard.layout.groups[0].page_tokens  # type: ignore[union-attr]
                end = total = -(-total // size) * size
            chunk = Chunk(first, end, total, target.request.start)
            found = self._moves[key] = target.plan.moves(chunk, self.tables, target.request.tables)
        return found

    def _seal_if_whole(self) -> None:
        """Once everything was submitted, tell each decoder rank how many writes that was."""
        if self._open_layers or not self._tail:
            return
        for target in self._targets:
            if target.open and not target.sealed:
                slot = self._p.seals.take()
                seal = SEAL.pack(target.request.epoch, target.writes, target.nbytes)
                self._p.seals.at(slot)[:] = np.frombuffer(seal, np.uint8)
                if not target.write(0, 0, functools.partial(self._sender.seal, target, slot), seal=True):
                    self._p.seals.give(slot)

    # ---- the decoders

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants it any more: what is still computed is computed for nothing."""
        return not any(target.open for target in self._targets)

    def _alive(self) -> None:
        """Raise why there is nobody left to write to."""
        now = time.monotonic()
        for target in self._targets:
            if target.deadline <= now and target.open:
                name = target.request.request_id
                error = DeadlineExceeded(
                    f"the deadline of request {name} has passed", peer=str(target.session.address), op="prefill"
                )
                target.stop("failed", "its deadline has passed", error)
        if self.cancelled:
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
            while not watch.wait_all(_LOOK) and watch.error is None and not self.cancelled and time.monotonic() < last:
                pass
        what = self._unpushed() if not self.cancelled else ""
        if what:
            reason = f"{what} of request {self.request.request_id} was never pushed"
            self.abandon(reason)
            raise FabricError(reason)
        if not self._settle():
            raise WaitTimeout(f"a write of request {self.request.request_id} does not end")
        for target in self._targets:
            if target.error is not None:
                raise target.error

    def abandon(self, reason: str, how: How = "failed") -> None:
        """End the job without completing it: cancel what is under way, then tell the decoders."""
        for target in self._targets:
            self._p._stop(target, how, reason)
        self._settle()

    def _unpushed(self) -> str:
        for layer in sorted(self._open_layers):
            gap = self._covered[layer].gap(self.start, self.total)
            return f"token {gap} of layer {layer}"
        return "" if self._tail else "the tail"

    def _settle(self) -> bool:
        """Wait for the end of all writes, good or bad, and give the source pages back. False: one did not end."""
        if self._left:
            return True
        for watch in self._watches:
            watch.close()
        end = max([time.monotonic(), *(target.deadline for target in self._targets)]) + _GRACE
        for target in self._targets:
            for transfer in target.transfers():
                try:
                    transfer.wait(max(0.0, end - time.monotonic()))  # helps the engine along, as a condition does not
                except FabricError:  # the target has heard of it
                    pass
        with self._sender.changed:  # the callbacks, for the times they note
            self._sender.changed.wait_for(lambda: not self._sender.under_way, timeout=max(0.0, end - time.monotonic()))
        while any(target.busy for target in self._targets) and time.monotonic() < end:
            with self._sender.changed:
                self._sender.changed.wait(0.005)  # the last step of a callback
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

    def __enter__(self) -> PrefillJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.finish()
        elif not self._left:
            self.abandon(str(error) if isinstance(error, FabricError) else f"the model failed: {error!r}")


def _same_pages(target: Target) -> bool:
    """Whether pages are of one size on both sides, with nothing but tokens in them."""
    groups = [*target.plan.src.layout.groups, *target.plan.dst.layout.groups]
    return (
        all(isinstance(group, AttentionGroup) and not (group.window or group.scale_bytes) for group in groups)
        and len({group.page_tokens for group in groups if isinstance(group, AttentionGroup)}) == 1
    )
