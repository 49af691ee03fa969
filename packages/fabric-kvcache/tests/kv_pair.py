"""A decoder and a prefiller in this process, for tests of what happens between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric_core import TransferEngine
from fabric_kvcache import AttentionGroup, CacheLayout, Decoder, KvLayout, PendingKv, Prefiller, PrefillJob

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=4, page_tokens=4)
LIMIT = 60.0  # seconds: the longest that anything may take which is meant to work
TOKENS = 10
KV = np.ones((2, TOKENS, 4), dtype=np.float32)
_GROUP = AttentionGroup(layers=2, kv_heads=2, head_dim=4, page_tokens=4, dtype="float32")


def instance(tp: int) -> CacheLayout:
    """The layout of an instance of so many ranks."""
    return CacheLayout(groups=(_GROUP,), tp=tp)


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.002)


def serve(job: PrefillJob, value: float = 1.0) -> None:
    """Push all of a job, every element `value`, and leave it."""
    with job:
        for layer in job.layers:
            words = np.full((2, job.total, 4), value, np.float32)
            job.push_layer(layer, 0, words, words)
        if job._p.tail_bytes:
            job.push_tail(bytes(job._p.tail_bytes))


@dataclass
class Pair:
    """`a` is the prefiller's engine, `b` the decoder's."""

    a: TransferEngine
    b: TransferEngine
    prefiller: Prefiller
    decoder: Decoder

    def ask(self, timeout: float = LIMIT, **how: Any) -> PendingKv:
        return self.decoder.submit(self.a.address, range(TOKENS), timeout=timeout, **how)

    def start(self, timeout: float = LIMIT, **how: Any) -> tuple[PrefillJob, PendingKv]:
        pending = self.ask(timeout, **how)
        return self.prefiller.next(LIMIT), pending


@contextmanager
def open_pair(prefiller_memory: Any = None, **decoder: Any) -> Iterator[Pair]:
    """Without a tail. `prefiller_memory`: if it is the user's own; `decoder`: arguments of the Decoder."""
    with (
        TransferEngine.open() as a,
        TransferEngine.open() as b,
        Prefiller(a, LAYOUT, pages=8, memory=prefiller_memory) as p,
        Decoder(b, LAYOUT, pages=16, **decoder) as d,
    ):
        yield Pair(a, b, p, d)
