"""Blocks and threads of kernels: no more than there are marks, memory and multiprocessors for. No GPU is needed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from fabric_moe import MoeConfig
from fabric_moe.cuda import blocks
from fabric_moe.cuda.layout import GpuLayout

V3: dict[str, Any] = {"experts": 256, "topk": 8, "hidden": 7168, "dtype": "float8_e4m3fn", "scale_bytes": 224}


def gpu_of(config: MoeConfig, multiprocessors: int = 132) -> Any:
    device = SimpleNamespace(multiprocessors=multiprocessors, shared_limit=226 << 10)
    return SimpleNamespace(layout=GpuLayout.of(config), device=device, config=config)


def test_a_block_takes_no_more_tokens_than_its_memory_holds() -> None:
    """Many tokens with a large top-k: more blocks rather than a launch that the driver refuses."""
    config = MoeConfig(ranks=8, experts=512, topk=128, hidden=64, max_tokens=1 << 17)
    gen = gpu_of(config)
    layout, device = gen.layout, gen.device
    assert blocks.each_of(gen, 1 << 17) == 512
    each = blocks.each_sent(gen, 1 << 17)
    assert layout.send_shared(each) <= device.shared_limit < layout.send_shared(2 * each)
    assert blocks.each_sent(gen, 4096) == blocks.each_of(gen, 4096)


@pytest.mark.parametrize("multiprocessors", [6, 108, 132, 148])
def test_no_more_blocks_than_marks(multiprocessors: int) -> None:
    """And no more marks than a block can look at, four by each of its threads that does not look at a word."""
    for ranks, topk in itertools.product((1, 2, 3, 8, 16, 64), (1, 2, 8, 9, 32, 40)):
        for limit in (1, 2, 7, 16, 32, 63, 128, 511, 960, 4096):
            config = MoeConfig(ranks=ranks, experts=256, topk=topk, hidden=64, max_tokens=limit)
            gen = gpu_of(config, multiprocessors)
            at = gen.layout
            for parts in (at.row_parts, at.sum_parts):
                assert parts % 4 == 0
                assert ranks * parts // 4 <= blocks.THREADS - -(-ranks // 32) * 32
            for tokens in {0, 1, 2, 5, limit // 2, limit} & set(range(limit + 1)):
                name, grid, threads, each, split = blocks.send_grid(gen, tokens)
                parts = 1 << split
                assert grid == (-(-tokens // each) + 1) * parts
                assert parts < 2 * ranks
                assert at.row_parts == 0 or grid // parts - 1 <= at.row_parts
                assert grid <= 2 * multiprocessors + 1 or at.send_shared(2 * each) > gen.device.shared_limit
                if name == "moe_dispatch_send_one":
                    assert topk <= 32
                    assert (each, threads) == (1, 256)
                else:
                    assert (name, threads, split) == ("moe_dispatch_send", blocks.THREADS, 0)
            assert at.sum_parts == 0 or blocks.sums_grid(gen, ranks * limit) - 1 <= at.sum_parts
            rows, threads = blocks.recv_grid(gen, ranks * limit)
            assert rows <= ranks * limit
            assert threads % 32 == 0
            assert max(127, -(-ranks // 32) * 32) < threads <= blocks.THREADS


def test_how_tokens_are_shared_out_on_an_h200() -> None:
    """Few: a block for each token, or some that share it as far as multiprocessors go; then many tokens for each."""
    found = {}
    for tokens in (0, 1, 16, 32, 65, 128, 263, 264, 4096):
        gen = gpu_of(MoeConfig(ranks=8, max_tokens=max(tokens, 1), **V3))
        name, *found[tokens] = blocks.send_grid(gen, tokens)
        assert name == ("moe_dispatch_send_one" if tokens < 264 else "moe_dispatch_send")
    assert found == {
        0: [8, 256, 1, 3], 1: [16, 256, 1, 3], 16: [68, 256, 1, 2], 32: [132, 256, 1, 2], 65: [132, 256, 1, 1],
        128: [129, 256, 1, 0], 263: [264, 256, 1, 0], 264: [265, 512, 1, 0], 4096: [257, 512, 16, 0],
    }  # fmt: skip
    eight = [GpuLayout.of(MoeConfig(ranks=8, max_tokens=n, **V3)) for n in (1, 16, 63, 128, 1000)]
    assert [at.row_parts for at in eight] == [4, 16, 64, 128, 0]
    assert [at.sum_parts for at in eight] == [8, 128, 240, 240, 0]
    assert all(at.plan_words == 18 for at in eight)
