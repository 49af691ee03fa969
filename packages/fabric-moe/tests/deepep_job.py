"""Buffers of the DeepEP facade for several ranks, and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from fabric_core import TransferEngine
from fabric_moe import Table
from fabric_moe.deepep import Buffer
from fabric_moe.reference import owner_of

RANKS, EXPERTS, TOPK, HIDDEN, MOST = 3, 8, 3, 256, 6
TOKENS = (5, 0, 6)


class Job:
    """Buffers of all ranks, each driven by a thread of its own."""

    def __init__(self) -> None:
        self.engine = TransferEngine.open(local_shuffle=5)
        table = Table()
        self.buffers = [
            Buffer(self.engine, table, r, RANKS, max_tokens=MOST, timeout=60.0) for r in range(RANKS)
        ]  # fmt: skip
        dice = torch.Generator().manual_seed(3)
        self.x = [torch.randn((t, HIDDEN), generator=dice).bfloat16() for t in TOKENS]
        self.ids = [torch.rand((t, EXPERTS), generator=dice).topk(TOPK, dim=1).indices for t in TOKENS]
        self.ids[0][1, 0] = self.ids[2][2, 2] = -1
        self.weights = [torch.rand((t, TOPK), generator=dice) for t in TOKENS]

    def on_all(self, call: Callable[[int, Buffer], Any]) -> list[Any]:
        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(call, range(RANKS), self.buffers, timeout=100))

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.destroy()
        self.engine.close()

    def rows(self, rank: int) -> list[tuple[int, int]]:
        """(source, token) of what a rank receives, in order."""
        found = []
        for s in range(RANKS):
            for t in range(TOKENS[s]):
                if any(e >= 0 and owner_of(e, EXPERTS, RANKS) == rank for e in self.ids[s][t].tolist()):
                    found.append((s, t))
        return found

    def first(self, rank: int) -> int:
        return min(e for e in range(EXPERTS) if owner_of(e, EXPERTS, RANKS) == rank)

    def held(self, rank: int) -> int:
        return sum(owner_of(e, EXPERTS, RANKS) == rank for e in range(EXPERTS))


def send(job: Job, rank: int, buffer: Buffer, **more: Any) -> tuple[Any, ...]:
    _, _, per_expert, _, _ = buffer.get_dispatch_layout(job.ids[rank], EXPERTS)
    return buffer.dispatch(
        more.pop("x", job.x[rank]), num_tokens_per_expert=per_expert, topk_idx=job.ids[rank],
        topk_weights=job.weights[rank], **more,
    )  # fmt: skip
