"""Prefill ranks and decoder ranks of any layouts, by the whole protocol: every byte, each once, nothing else touched.

Each rank is an engine of its own. Pools are memory of the user on both sides: what a source pool must hold, and what a
destination must hold afterwards, comes from layout_oracle.py. Destinations are full of poison before.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from layout_oracle import logical, memory, pool_pages, random_tables, ranks
from test_layout_engine import attention, hybrid

from fabric_core import FabricError, TransferEngine
from fabric_kvcache import CacheLayout, Decoder, LatentGroup, Prefiller, PrefillRefused
from fabric_kvcache.cache import AttentionGroup
from fabric_kvcache.poison import POISON
from fabric_kvcache.shard import Shard

LIMIT = 30.0
TAIL = 24


def latent(tp: int, page: int, pp: int = 1) -> CacheLayout:
    return CacheLayout(groups=(LatentGroup(layers=6, latent_dim=9, page_tokens=page, dtype="bfloat16"),), tp=tp, pp=pp)


def windowed(tp: int, page: int) -> CacheLayout:
    full, local = (
        AttentionGroup(layers=layers, kv_heads=2, head_dim=4, page_tokens=page, dtype="float16", window=window)
        for layers, window in (((0, 3), 0), ((1, 2), 21))
    )
    return CacheLayout(groups=(full, local), tp=tp)


def staged(tp: int, page: int, pp: int) -> CacheLayout:
    group = AttentionGroup(layers=6, kv_heads=4, head_dim=4, page_tokens=page, dtype="bfloat16", axes="separate-NHD")
    return CacheLayout(groups=(group,), tp=tp, pp=pp)


def scaled(tp: int, page: int) -> CacheLayout:
    group = AttentionGroup(
        layers=3, kv_heads=4, head_dim=4, page_tokens=page, dtype="float8_e4m3", scale_bytes=4, axes="page-HND"
    )
    return CacheLayout(groups=(group,), tp=tp)


class Cluster:
    """All ranks of both instances, in this process."""

    def __init__(self, src: CacheLayout, dst: CacheLayout, total: int, seed: int, stack: contextlib.ExitStack) -> None:
        self.src, self.dst, self.total = src, dst, total
        self.rng = np.random.default_rng(seed)
        self.pages = pool_pages(src, total, 3), pool_pages(dst, total, 3)
        self.prefillers, self.decoders = [], []
        for shard in ranks(src, self.pages[0]):
            octets = np.zeros(max(1, shard.nbytes), np.uint8)
            engine = stack.enter_context(TransferEngine.open())
            self.prefillers.append(stack.enter_context(_role(Prefiller, engine, shard, octets)))
        for shard in ranks(dst, self.pages[1]):
            octets = np.full(max(1, shard.nbytes), POISON, np.uint8)
            engine = stack.enter_context(TransferEngine.open())
            self.decoders.append(stack.enter_context(_role(Decoder, engine, shard, octets)))

    def move(self, start: int, cuts: list[int], request_id: str) -> list[int]:
        """Move one prompt to all decoder ranks, and compare. Returns how many writes each prefill rank made."""
        rng, total = self.rng, self.total
        content, ones = logical(self.src, total, rng), logical(self.src, total, None)
        tables = random_tables(self.src, self.pages[0], total, rng), random_tables(self.dst, self.pages[1], total, rng)
        addresses = [p.engine.address for p in self.prefillers]
        rng.shuffle(addresses)
        for decoder in self.decoders:
            decoder.pool.octets[:] = POISON
        pending = [
            d.submit(addresses, total, start=start, tables=tables[1], request_id=request_id, timeout=LIMIT)
            for d in self.decoders
        ]
        counts = [0] * len(self.prefillers)

        def serve(number: int) -> None:
            prefiller = self.prefillers[number]
            octets = memory(prefiller.shard, content, tables[0], total, 0)
            prefiller.pool.octets[: len(octets)] = octets
            with prefiller.take(request_id, LIMIT) as job:
                job.use(tables[0])
                marks = sorted({0, total, *(cut for cut in cuts if cut < total)})  # what is there already is left out
                for first, end in itertools.pairwise(marks):
                    for layer in job.layers:
                        job.push(layer, first, end)
                job.push_tail(f"tail of {request_id}".encode().ljust(TAIL))
            counts[number] = sum(push.writes for push in job.pushes)

        asked = [
            k for k, p in enumerate(self.prefillers) if any(p.engine.address in _asked(one) for one in _sent(pending))
        ]
        threads = [threading.Thread(target=serve, args=(k,)) for k in asked]
        for thread in threads:
            thread.start()
        for one, decoder in zip(pending, self.decoders, strict=True):
            with one.wait(LIMIT) as kv:
                assert kv.tail == f"tail of {request_id}".encode().ljust(TAIL)
                expected = memory(decoder.shard, content, tables[1], total, start)
                mask = memory(decoder.shard, ones, tables[1], total, start)
                got = decoder.pool.octets[: len(expected)]
                assert np.array_equal(got, np.where(mask == 1, expected, POISON))
                assert kv.nbytes == int(mask.sum()) + TAIL
        for thread in threads:
            thread.join(LIMIT)
        return counts


def _role(kind: Any, engine: TransferEngine, shard: Shard, octets: Any) -> Any:
    return kind(engine, shard.layout, tp=shard.tp, pp=shard.pp, pages=shard.pages, memory=octets, tail_bytes=TAIL)


def _sent(pending: list[Any]) -> Iterator[Any]:
    for one in pending:
        assert one._moved.wait(LIMIT)
        yield one


def _asked(pending: Any) -> list[Any]:
    return [rank.address for rank in pending._sources]


@pytest.mark.parametrize(
    ("src", "dst", "start"),
    [
        pytest.param(attention(2, 16, "head-HND"), attention(1, 32, "block-NHD"), 0, id="TP2-to-TP1"),
        pytest.param(attention(1, 32, "separate-HND"), attention(4, 16, "head-HND"), 40, id="TP1-to-TP4-prefix"),
        pytest.param(attention(4, 16, "page-NHD"), attention(2, 16, "page-HND"), 0, id="TP4-to-TP2"),
        pytest.param(staged(2, 8, 2), staged(1, 16, 1), 5, id="PP2-to-PP1"),
        pytest.param(staged(1, 8, 1), staged(2, 8, 2), 0, id="PP1-to-PP2"),
        pytest.param(latent(4, 8), latent(2, 16), 0, id="MLA-TP4-to-TP2"),
        pytest.param(windowed(2, 8), windowed(1, 4), 0, id="window"),
        pytest.param(scaled(2, 32), scaled(4, 16), 32, id="scales"),
        pytest.param(hybrid(2, 32), hybrid(1, 16), 0, id="latent-scales-state"),
    ],
)
def test_every_rank_gets_every_byte_once(src: CacheLayout, dst: CacheLayout, start: int) -> None:
    with contextlib.ExitStack() as stack:
        cluster = Cluster(src, dst, 99, 11, stack)
        counts = np.array([cluster.move(start, [47, 48, 65], f"r{k}") for k in range(3)])
        if isinstance(src.groups[0], LatentGroup) and len(src.groups) == 1:
            assert (counts.sum(axis=0) > 0).all(), "replicas do not share the work"
        for decoder in cluster.decoders:
            assert decoder.in_flight == 0
            assert decoder.slots.free == decoder.slots.count
        for prefiller in cluster.prefillers:
            assert prefiller._targets == {}
            assert prefiller._waiting == {}


def test_a_pair_that_cannot_work_is_refused_at_the_handshake_with_both_sides_values() -> None:
    with contextlib.ExitStack() as stack:
        cluster = Cluster(scaled(1, 16), scaled(1, 32), 40, 1, stack)
        with pytest.raises(PrefillRefused, match=r"scale for 16 tokens .* one for 32"):
            cluster.decoders[0].submit(cluster.prefillers[0].engine.address, 40, tables=[[0, 1]]).wait(LIMIT)


def test_an_instance_is_named_with_all_its_ranks() -> None:
    with contextlib.ExitStack() as stack:
        cluster = Cluster(attention(2, 16, "head-HND"), attention(1, 16, "head-HND"), 16, 1, stack)
        others = Cluster(attention(1, 16, "head-HND"), attention(1, 16, "head-HND"), 16, 1, stack)
        first, second = (p.engine.address for p in cluster.prefillers)
        stranger = others.prefillers[0].engine.address
        for named, said in (
            ([first], "TP 2 x PP 1 ranks and 1 were named; missing: TP 1 PP 0"),
            ([first, second, second], "some of them twice"),
            ([first, stranger], "different caches"),
        ):
            with pytest.raises(PrefillRefused, match=said):
                cluster.decoders[0].submit(named, 16, tables=[[0]], timeout=LIMIT).wait()
        assert cluster.decoders[0].slots.free == cluster.decoders[0].slots.count


def test_one_rank_that_cancels_leaves_the_others_theirs() -> None:
    """One job, two decoder ranks: the second one gives up, the first one gets everything."""
    with contextlib.ExitStack() as stack:
        cluster = Cluster(attention(1, 16, "head-HND"), attention(2, 16, "head-HND"), 32, 3, stack)
        prefiller = cluster.prefillers[0]
        tables = [[2, 0]]
        first, second = (
            d.submit(prefiller.engine.address, 32, tables=tables, request_id="x", timeout=LIMIT)
            for d in cluster.decoders
        )
        job = prefiller.take("x", LIMIT)
        prefiller.pool.octets[:] = 7
        job.use([[1, 2]])
        job.push(0, 0, 32)
        second.cancel()
        assert second.wait_settled(LIMIT)
        for layer in job.layers[1:]:
            job.push(layer, 0, 32)
        job.push_tail(bytes(TAIL))
        with first.wait(LIMIT) as kv:
            assert kv.tail == bytes(TAIL)
        with pytest.raises(FabricError, match="cancelled"):
            job.finish()
