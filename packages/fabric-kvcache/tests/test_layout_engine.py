"""Plans on the real engine: prefill ranks and a decode rank with layouts of their own, by `submit_paged_writes`."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from layout_oracle import chunks_of, logical, memory, pool_pages, random_tables, ranks

from fabric_core import TransferEngine
from fabric_kvcache.cache import AttentionGroup, CacheLayout, LatentGroup, StateGroup, StatePart
from fabric_kvcache.plan import make_plan

LIMIT = 30.0


def attention(tp: int, page: int, axes: str) -> CacheLayout:
    group = AttentionGroup(layers=6, kv_heads=4, head_dim=16, page_tokens=page, dtype="bfloat16", axes=axes)
    return CacheLayout(groups=(group,), tp=tp)


def hybrid(tp: int, page: int) -> CacheLayout:
    parts = (StatePart(name="ssm", units=8, unit_bytes=256), StatePart(name="groups", units=1, unit_bytes=64))
    return CacheLayout(
        groups=(
            LatentGroup(layers=(0, 2), latent_dim=36, page_tokens=page, dtype="float8_e4m3", scale_bytes=4),
            StateGroup(layers=(1, 3), parts=parts),
        ),
        tp=tp,
    )


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        pytest.param(attention(2, 16, "head-HND"), attention(1, 32, "block-NHD"), id="TP2-to-TP1"),
        pytest.param(attention(1, 32, "separate-HND"), attention(8, 16, "head-HND"), id="TP1-to-TP8"),
        pytest.param(hybrid(4, 32), hybrid(2, 16), id="latent-and-state"),
    ],
)
def test_a_prompt_arrives_byte_by_byte_and_as_many_immediates_as_the_layouts_say(
    src: CacheLayout, dst: CacheLayout
) -> None:
    rng = np.random.default_rng(11)
    total = 150
    chunks = chunks_of(total, 0, [63, 64, 100])
    content, ones = logical(src, total, rng), logical(src, total, None)
    pages = pool_pages(src, total, 3), pool_pages(dst, total, 3)
    tables = random_tables(src, pages[0], total, rng), random_tables(dst, pages[1], total, rng)
    with contextlib.ExitStack() as stack:
        decoder = stack.enter_context(TransferEngine.open())
        prefiller = stack.enter_context(TransferEngine.open())
        senders = []
        for shard in ranks(src, pages[0]):
            octets = memory(shard, content, tables[0], total, 0)
            senders.append((shard, prefiller.reg_mr(octets)[0], octets))
        for target in ranks(dst, pages[1]):
            expected = memory(target, content, tables[1], total, 0)
            mask = memory(target, ones, tables[1], total, 0)
            got = np.full(len(expected), 0xEE, np.uint8)
            _handle, desc = decoder.reg_mr(got)
            imm = decoder.alloc_imm()
            plans = [(make_plan(shard, target, seed=3), handle) for shard, handle, _octets in senders]
            arrived = decoder.expect_imm_count(imm, sum(p.writes(chunk) for p, _h in plans for chunk in chunks))
            for chunk in chunks:
                for plan, handle in plans:
                    moves = plan.moves(chunk, *tables, merge=False)
                    for layer in moves.layers:
                        for length, a, b in moves.at(layer):
                            prefiller.submit_paged_writes(length, imm, (handle, a), (desc, b))
            arrived.wait(LIMIT)
            assert np.array_equal(got, np.where(mask == 1, expected, 0xEE))
