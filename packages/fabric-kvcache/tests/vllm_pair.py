"""Worker halves of both sides in this process, whose engine is played by the test."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm_fakes import LIMIT, POISON, cache_of, until, words_of

from fabric_kvcache.vllm.caches import LayerCache
from fabric_kvcache.vllm.options import Options
from fabric_kvcache.vllm.params import Recv
from fabric_kvcache.vllm.steps import Advance, Load, Report, Step
from fabric_kvcache.vllm.worker import Worker

P_BLOCKS, D_BLOCKS = [5, 2, 9], [7, 1, 4]
TOTAL = 10  # tokens, in blocks of 4


@dataclass
class Rank:
    """One rank of an engine: a worker, its cache, and what it has said so far."""

    worker: Worker
    caches: list[LayerCache]
    sent: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    said: Report = field(default_factory=Report)

    def step(
        self,
        *advances: Advance,
        compute: Callable[[int], object] = lambda _: None,
        silent: Collection[int] = (),
        **more: Any,
    ) -> None:
        """One step of the engine; `compute(layer)` before each layer is announced. `silent`: layers without a hook."""
        self.worker.begin(Step(advances=list(advances), **more))
        for layer, cache in enumerate(self.caches):
            compute(layer)
            if layer not in silent:
                self.worker.layer(cache.name)
        self.worker.end()
        self.poll()

    def poll(self) -> None:
        sent, ended, failed = self.worker.poll()
        assert not self.sent & sent, "named twice"
        assert not self.ended & ended, "named twice"
        self.sent |= sent
        self.ended |= ended
        self.failed |= failed
        self.said.add(self.worker.report())


Ranks = Callable[..., Rank]


@contextmanager
def opening() -> Iterator[Ranks]:
    """Gives what opens a rank; all are closed afterwards."""
    with ExitStack() as stack:

        def open_one(
            caches: list[LayerCache], *, role: str, tp: int = 1, rank: int = 0, packing: str = "", **options: Any
        ) -> Rank:
            worker = Worker(
                caches,
                Options(**{"timeout": LIMIT, "hold": LIMIT, **options}),
                tp=tp,
                rank=rank,
                packing=packing,
                device="cpu",
                instance="d0",
                most=16,
                producer=role in {"p", "both"},
                consumer=role in {"d", "both"},
            )
            stack.callback(worker.close)
            return Rank(worker, caches)

        yield open_one


def pair(open_rank: Ranks, *, packing: str = "cpu-vec", **options: Any) -> tuple[Rank, Rank]:
    p = open_rank(cache_of(), role="p", packing=packing, **options)
    d = open_rank(cache_of(), role="d", packing=packing, **options)
    return p, d


def load(p: Sequence[Rank], blocks: Sequence[int], total: int, *, start: int = 0, name: str = "t") -> Load:
    want = Recv(name, addresses=tuple(rank.worker.address for rank in p))
    return Load(f"d-{name}", want, (list(blocks),), start, total)


def advance(
    blocks: Sequence[int], first: int, end: int, total: int, *, name: str = "t", moved: bool = False
) -> Advance:
    return Advance(f"p-{name}", name, (list(blocks),), first, end, total, moved)


def settle(p: Rank, d: Rank, name: str = "t") -> None:
    """Let both engines step until the request has ended here and there."""

    def over() -> bool:
        p.poll()
        d.poll()
        return f"d-{name}" in d.ended and f"p-{name}" in p.sent

    until(over)


def held(name: str = "t") -> dict[str, Any]:
    return {"held": {f"p-{name}": (name, LIMIT)}}


def same(p: Rank, d: Rank, mine: Sequence[int], yours: Sequence[int]) -> None:
    """Blocks `yours` of d hold what blocks `mine` of p do, and all others of d are as they were."""
    here, there = words_of(p.caches), words_of(d.caches)
    for a, b in zip(mine, yours, strict=True):
        assert np.array_equal(here[:, a], there[:, b]), f"block {b}"
    others = [block for block in range(there.shape[1]) if block not in yours]
    assert (there[:, others] == POISON).all()


def asked(p: Rank) -> None:
    """Until a decoder's request has come."""
    sends = p.worker.sends
    assert sends is not None
    until(lambda: bool(sends._prefiller.asked))
