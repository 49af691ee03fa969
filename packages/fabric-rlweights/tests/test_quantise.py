"""fp8 on the way: bit-equal with quantising the whole tensor at once, for any cutting over ranks."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import numpy as np
import pytest
from oracle import place, plain, random_bits, shard

from fabric_core import ConfigError, TransferEngine
from fabric_rlweights.controller import Controller
from fabric_rlweights.meta import EngineTable, Quant, TrainerTable
from fabric_rlweights.plan import Options
from fabric_rlweights.receiver import Receiver
from fabric_rlweights.trainer import Outcome, Trainer

torch = pytest.importorskip("torch")


def reference(x: Any, block: int) -> tuple[Any, Any]:
    """The whole tensor at once, as inference engines quantise: pad to blocks, reduce, multiply by the inverse."""
    rows, columns = -(-x.shape[0] // block), -(-x.shape[1] // block)
    padded = torch.zeros(rows * block, columns * block, dtype=torch.float32)
    padded[: x.shape[0], : x.shape[1]] = x.float()
    tiles = padded.view(rows, block, columns, block)
    scale = tiles.abs().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    whole = (tiles * (1.0 / scale)).to(torch.float8_e4m3fn).view(rows * block, columns * block)
    return whole[: x.shape[0], : x.shape[1]].contiguous(), scale.view(rows, columns)


def update(
    trainers: list[TrainerTable], buffers: list[Any], engines: list[EngineTable], **more: Any
) -> tuple[list[Outcome], list[dict[str, Any]]]:
    """One update, everything in this process; returns the outcomes and the receivers' memory."""
    memory = [{t.name: np.full(t.shape, 0xFF, _bits(t.dtype)) for t in table.tensors} for table in engines]
    watermark = more.pop("watermark", 1 << 20)
    with TransferEngine.open() as engine:
        controller = Controller(engine, trainers=len(trainers), receivers=len(engines), digests=True, **more)
        opened = [TransferEngine.open() for _ in range(len(trainers) + len(engines))]
        there = [
            Trainer(opened[i], table, buffers[i], controller=engine.address, watermark=watermark)
            for i, table in enumerate(trainers)
        ]
        receivers = [
            Receiver(opened[len(trainers) + i], table, memory[i], controller=engine.address)
            for i, table in enumerate(engines)
        ]
        try:
            controller.wait_ready(30)
            outcomes: list[Any] = [None] * len(there)

            def push(i: int) -> None:
                outcomes[i] = there[i].push(1, timeout=60)

            threads = [threading.Thread(target=push, args=(i,)) for i in range(len(there))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(90)
        finally:
            for trainer in there:
                trainer.close()
            for receiver in receivers:
                receiver.close()
            controller.close()
            for one in opened:
                one.close()
    return outcomes, memory


def _bits(dtype: str) -> str:
    return {"bfloat16": "<u2", "float32": "<f4", "float8_e4m3fn": "<u1", "float16": "<u2"}[dtype]


def rows(name: str, bits: Any, dtype: str, parts: int, cut: int = 0) -> tuple[list[TrainerTable], list[Any]]:
    """A parameter cut along an axis, one part for each trainer."""
    tables, buffers = [], []
    step = -(-bits.shape[cut] // parts)
    for rank in range(parts):
        start, size = [0, 0], list(bits.shape)
        own: list[Any] = []
        start[cut] = min(rank * step, bits.shape[cut])
        size[cut] = min(step, bits.shape[cut] - start[cut])
        one = shard(name, dtype, bits, (start[0], start[1]), (size[0], size[1]), own)
        tables.append(TrainerTable(rank=rank, shards=(one,)))
        buffers.append(own)
    return tables, buffers


@pytest.mark.parametrize(
    ("shape", "parts", "cut", "piece"),
    [((300, 260), 3, 0, 1 << 20), ((300, 260), 3, 1, 1 << 20), ((576, 64), 16, 0, 1 << 20), ((512, 256), 2, 0, 128)],
    ids=["rows cut blocks", "columns cut blocks", "16 ranks in 5 blocks", "tiny pieces"],
)
def test_blocks_that_ranks_share_are_bit_equal(shape: tuple[int, int], parts: int, cut: int, piece: int) -> None:
    bits = random_bits(np.random.default_rng(1), shape, "bfloat16")
    bits[:3] = 0
    bits[0, 0] = 0x4380  # 256: one block's largest, in one rank's part
    trainers, buffers = rows("w", bits, "bfloat16", parts, cut)
    scales = (-(-shape[0] // 128), -(-shape[1] // 128))
    quant = Quant(scheme="block", scales="w_scale")
    tensors = (plain("w", shape, "float8_e4m3fn", quant=quant), plain("w_scale", scales, "float32"))
    engines = [
        EngineTable(rank=rank, tensors=tensors, entries=(place("w", "w", (0, 0), shape, (0, 0)),)) for rank in range(2)
    ]
    outcomes, memory = update(trainers, buffers, engines, options=Options(piece_bytes=piece))
    assert all(outcome.committed for outcome in outcomes), outcomes
    want, scale = reference(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), 128)
    for found in memory:
        np.testing.assert_array_equal(found["w_scale"], scale.numpy())
        np.testing.assert_array_equal(found["w"], want.view(torch.uint8).numpy())


def test_one_scale_for_a_fused_tensor_covers_all_its_parts() -> None:
    rng = np.random.default_rng(2)
    q, k = random_bits(rng, (96, 64), "bfloat16"), random_bits(rng, (32, 64), "bfloat16")
    (a, b), (a_buffers, b_buffers) = rows("q", q, "bfloat16", 2)
    (c, d), (c_buffers, d_buffers) = rows("k", k, "bfloat16", 2)
    moved = [[s.model_copy(update={"buffer": 1}) for s in t.shards] for t in (c, d)]
    trainers = [TrainerTable(rank=r, shards=(*t.shards, *moved[r])) for r, t in enumerate((a, b))]
    quant = Quant(scheme="tensor", scales="scale")
    tensors = (plain("qk", (64, 64), "float8_e4m3fn", quant=quant), plain("scale", (1,), "float32"))
    engines = []
    for rank in range(2):
        entries = (
            place("q", "qk", (48 * rank, 0), (48, 64), (0, 0)),
            place("k", "qk", (16 * rank, 0), (16, 64), (48, 0)),
        )
        engines.append(EngineTable(rank=rank, tensors=tensors, entries=entries))
    outcomes, memory = update(trainers, [a_buffers + c_buffers, b_buffers + d_buffers], engines)
    assert all(outcome.committed for outcome in outcomes), outcomes
    for rank, found in enumerate(memory):
        whole = np.concatenate([q[48 * rank : 48 * rank + 48], k[16 * rank : 16 * rank + 16]])
        x = torch.from_numpy(whole.view(np.int16)).view(torch.bfloat16).float()
        scale = x.abs().amax().clamp(1e-4) / 448.0
        assert found["scale"][0] == scale.item()
        want = (x * (1.0 / scale)).to(torch.float8_e4m3fn)
        np.testing.assert_array_equal(found["qk"], want.view(torch.uint8).numpy())


@pytest.mark.parametrize("watermark", [1 << 13, 1 << 14, 1 << 16, 1 << 18, 1 << 20])
def test_temporary_memory_stays_under_the_watermark(watermark: int) -> None:
    bits = random_bits(np.random.default_rng(3), (256, 256), "float32")
    trainers, buffers = rows("w", bits, "float32", 2)
    engines = [
        EngineTable(
            rank=0,
            tensors=(plain("w", (256, 256), "bfloat16"),),
            entries=(place("w", "w", (0, 0), (256, 256), (0, 0)),),
        )
    ]
    outcomes, memory = update(trainers, buffers, engines, watermark=watermark, options=Options(piece_bytes=4096))
    assert all(outcome.committed for outcome in outcomes), outcomes
    want = torch.from_numpy(bits.view(np.float32)).to(torch.bfloat16)
    np.testing.assert_array_equal(memory[0]["w"], want.view(torch.int16).numpy().view(np.uint16))
    assert all(0 < outcome.stats.peak <= watermark for outcome in outcomes)


def test_a_watermark_below_one_piece_is_an_error_with_both_numbers() -> None:
    bits = random_bits(np.random.default_rng(4), (64, 64), "float32")
    (table,), (buffers,) = rows("w", bits, "float32", 1)
    engine_table = EngineTable(
        rank=0, tensors=(plain("w", (64, 64), "bfloat16"),), entries=(place("w", "w", (0, 0), (64, 64), (0, 0)),)
    )
    with pytest.raises(ConfigError, match=r"8192 bytes of temporary memory .* the watermark is 4096"):
        update([table], [buffers], [engine_table], watermark=4096)


def test_blocks_that_a_destination_cuts_are_refused_with_the_cure() -> None:
    from dry_run import plan_of
    from oracle import World

    bits = random_bits(np.random.default_rng(5), (192, 64), "bfloat16")
    (table,), (buffers,) = rows("w", bits, "bfloat16", 1)
    tensors = (
        plain("w", (96, 64), "float8_e4m3fn", quant=Quant(scheme="block", scales="s")),
        plain("s", (1, 1), "float32"),
    )
    engine = EngineTable(rank=0, tensors=tensors, entries=(place("w", "w", (96, 0), (96, 64), (0, 0)),))
    with pytest.raises(ConfigError, match=r"rank 0: w wants w: rows or columns 96\.\.192 .* layout staging"):
        plan_of(World({"w": ("bfloat16", bits)}, [table], [buffers], [engine]))
