"""The side that computes prompts and pushes their KV, layer by layer, into the decoders' memory.

    prefiller = Prefiller(engine, layout, pages=256, tail_bytes=4 * vocabulary)
    while True:
        job = prefiller.next(timeout=60)
        with job:                                  # leaving it waits for the writes, or refuses the request
            for layer in job.layers:
                ... compute ...
                job.push_layer(layer, 0, keys, values)
            job.push_tail(logits)

A `Prefiller` is one rank. A request comes from every decoder rank that this one has something for; they become one job
when the last of them has asked. A push is submitted and does not wait, so that the transfer of a layer runs while the
next one is computed. The source pages are free again once every write has ended here.

Requests arrive on the engine's callback thread and are checked there; jobs belong to the thread that called `next`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from fabric_core import ConfigError, FabricError, StaleHandle, TransferEngine, WaitTimeout
from fabric_kvcache import hub
from fabric_kvcache.arguments import LONGEST_SLEEP, name, seconds
from fabric_kvcache.cache import CacheLayout
from fabric_kvcache.job import PrefillJob
from fabric_kvcache.layout import KvLayout
from fabric_kvcache.pool import PagePool, PoolExhausted, as_layout
from fabric_kvcache.protocol import SEAL
from fabric_kvcache.reception import Reception
from fabric_kvcache.shard import Shard
from fabric_kvcache.slots import SlotPool
from fabric_kvcache.target import Target

__all__ = ["Prefiller"]

_SEALS = 4096  # seals under way


class Prefiller(Reception):
    """One prefill rank. It takes requests and hands them out as jobs.

    Args:
        layout, tp, pp, pages, memory, bases: as of a `Decoder`. With a `memory` of your own, a job's pages are those of
            your allocator: `job.use(tables)`.
        tail_bytes: what comes with each request beside the pages; the decoders' must be the same.
        max_jobs: jobs at a time.
        max_waiting: requests that wait for their turn, or for their other ranks; what comes beyond is refused.
        max_sessions: decoder ranks that are known at a time.
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
        max_jobs: int = 8,
        max_waiting: int = 64,
        max_sessions: int = 4096,
    ) -> None:
        if min(max_jobs, max_waiting, max_sessions) < 1 or tail_bytes < 0:
            raise ConfigError(
                f"max_jobs={max_jobs}, max_waiting={max_waiting}, max_sessions={max_sessions}, "
                f"tail_bytes={tail_bytes}: the first three must be above 0, the last one 0 or more"
            )
        self.layout = layout
        self.shard = Shard(as_layout(layout), tp=tp, pp=pp, pages=pages, bases=bases)
        hub.check_vacant(engine)  # before memory is allocated and registered
        with ExitStack() as undo:
            self.pool = PagePool(engine, self.shard, memory=memory, write=False)
            undo.callback(self.pool.close)
            self.tails = SlotPool(engine, max_jobs, max(1, tail_bytes), write=False, what="jobs")
            undo.callback(self.tails.close)
            self.seals = SlotPool(engine, _SEALS, SEAL.size, write=False, what="seals")
            undo.callback(self.seals.close)
            super().__init__(engine, self.shard, self.pool, tail_bytes, max_waiting, max_sessions)
            undo.pop_all()

    # ---- jobs

    def next(self, timeout: float) -> PrefillJob:
        """Return the next request as a job.

        Raises WaitTimeout if there is none within `timeout` seconds (`math.inf`: for ever), StaleHandle once the
        prefiller is closed, also while it waits.
        """
        return self._job(None, timeout)

    def take(self, request_id: str, timeout: float) -> PrefillJob:
        """Return that request as a job, for engines that schedule by themselves. Raises as `next` does."""
        return self._job(name("request_id", request_id), timeout)

    def _job(self, wanted: str | None, timeout: float) -> PrefillJob:
        end = time.monotonic() + seconds("timeout", timeout)
        while True:
            with self._changed:
                while True:
                    if self._closed:
                        raise StaleHandle("the prefiller is closed: it takes no requests any more")
                    key = next((key for key in self._whole if wanted is None or key[1] == wanted), None)
                    if key is not None:
                        break
                    left = end - time.monotonic()
                    if left <= 0:
                        what = "no request came" if wanted is None else f"request {wanted} did not come"
                        raise WaitTimeout(f"{what} within {timeout:g} s")
                    self._changed.wait(min(left, LONGEST_SLEEP))
                del self._whole[key]
                group = self._waiting.pop(key)
            job = self._start(list(group.targets.values()))
            if job is not None:
                return job

    def _start(self, targets: list[Target]) -> PrefillJob | None:
        now = time.monotonic()
        for target in targets:
            if target.deadline <= now:
                self._stop(target, "refused", "its deadline passed while it waited")
        if not any(target.open for target in targets):
            return None
        total = targets[0].request.total
        if any(target.request.total != total for target in targets):
            for target in targets:
                self._stop(target, "refused", "its decoder ranks name prompts of different lengths")
            return None
        prompts = [target.request.tokens for target in targets if len(target.request.tokens)]
        if any(not np.array_equal(prompt, prompts[0]) for prompt in prompts[1:]):
            for target in targets:
                self._stop(
                    target,
                    "refused",
                    "its decoder ranks name different prompts: give each decode instance a name, "
                    "Decoder(instance=...), and each prompt a request id of its own",
                )
            return None
        targets.sort(key=lambda target: not len(target.request.tokens))  # a rank may name only the length
        try:
            lease = self.pool.lease(total) if self.pool.own else None
        except PoolExhausted as error:
            self._no_room(targets, error)
            return None
        try:
            slot = self.tails.take()
        except PoolExhausted as error:
            if lease is not None:
                lease.release()
            self._no_room(targets, error)
            return None
        return PrefillJob(self, targets, lease, slot)

    def _no_room(self, targets: list[Target], error: FabricError) -> None:
        for target in targets:
            self._stop(target, "refused", f"the prefiller has no room: {error}")

    def close(self) -> None:
        """Take no more requests; those that wait are refused, and every decoder is told. Idempotent.

        Jobs must have been left. Who waits in `next` or `take` gets StaleHandle.
        """
        if not self._leave():
            return
        self.pool.close()
        self.tails.close()
        self.seals.close()

    def __enter__(self) -> Prefiller:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
