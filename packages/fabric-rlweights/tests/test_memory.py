"""Temporary memory, seen from outside: what the process holds while it casts and quantises under five watermarks."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import numpy as np
import pytest
from oracle import place, plain, random_bits, shard

from fabric_core import TransferEngine
from fabric_rlweights.controller import Controller
from fabric_rlweights.meta import EngineTable, Quant, TrainerTable
from fabric_rlweights.plan import Options
from fabric_rlweights.receiver import Receiver
from fabric_rlweights.trainer import Outcome, Trainer

pytest.importorskip("torch")
SIDE = 3072
RANKS = 2
#: Of Python itself: stacks of threads, messages. A copy of one rank's part would be 9 MiB or more.
ROOM = 4 << 20


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the kernel does not let us reset the peak of resident memory: {error}")


def push_all(trainers: list[Trainer], version: int) -> list[Outcome]:
    outcomes: list[Any] = [None] * len(trainers)

    def push(rank: int) -> None:
        outcomes[rank] = trainers[rank].push(version, timeout=60)

    threads = [threading.Thread(target=push, args=(rank,)) for rank in range(len(trainers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return outcomes


@pytest.mark.parametrize("watermark", [1 << 17, 1 << 18, 1 << 20, 1 << 22, 1 << 24])
@pytest.mark.parametrize("target", ["bfloat16", "float8_e4m3fn"])
def test_resident_memory_does_not_grow_beyond_the_watermark(target: str, watermark: int) -> None:
    whole = random_bits(np.random.default_rng(0), (SIDE, SIDE), "float32")
    step = SIDE // RANKS
    buffers: list[list[Any]] = [[] for _ in range(RANKS)]
    tables = [
        TrainerTable(rank=r, shards=(shard("w", "float32", whole, (r * step, 0), (step, SIDE), buffers[r]),))
        for r in range(RANKS)
    ]
    fp8 = target != "bfloat16"
    tensors = [plain("w", (SIDE, SIDE), target, quant=Quant(scheme="block", scales="s") if fp8 else None)]
    memory: dict[str, Any] = {"w": np.zeros((SIDE, SIDE), np.uint8 if fp8 else np.uint16)}
    if fp8:
        tensors.append(plain("s", (SIDE // 128, SIDE // 128), "float32"))
        memory["s"] = np.zeros((SIDE // 128, SIDE // 128), np.float32)
    table = EngineTable(rank=0, tensors=tuple(tensors), entries=(place("w", "w", (0, 0), (SIDE, SIDE), (0, 0)),))
    piece = 1 << 14 if fp8 else watermark // 4  # of fp8 a piece of 128 x 128 needs five times as much beside it
    engines = [TransferEngine.open() for _ in range(RANKS + 2)]
    controller = Controller(engines[0], trainers=RANKS, receivers=1, options=Options(piece_bytes=piece))
    address = engines[0].address
    trainers = [
        Trainer(engines[1 + r], tables[r], buffers[r], controller=address, watermark=watermark) for r in range(RANKS)
    ]
    receiver = Receiver(engines[-1], table, memory, controller=address)
    try:
        controller.wait_ready(60)
        push_all(trainers, 1)  # touches the watermark's own memory, and the destination
        forget_peak()
        before = resident("VmRSS")
        outcomes = push_all(trainers, 2)
        grown = resident("VmHWM") - before
    finally:
        for trainer in trainers:
            trainer.close()
        receiver.close()
        controller.close()
        for engine in engines:
            engine.close()
    assert all(outcome.committed for outcome in outcomes), outcomes
    assert all(0 < outcome.stats.peak <= watermark for outcome in outcomes)
    assert grown <= ROOM, f"{grown} bytes more than after the first update"
