"""Groups for the name `deep_ep`: ranks that are threads, and a rank of torch.distributed as a process. RANK FOLDER."""

from __future__ import annotations

import sys
from threading import Barrier
from typing import Any

LIMIT = 60.0  # seconds: the longest that anything may take which is meant to work


class Group:
    """A rank that is a thread, in the manner of vLLM's StatelessProcessGroup."""

    def __init__(self, rank: int, board: list[Any], barrier: Barrier) -> None:
        self.rank, self.world_size = rank, len(board)
        self._board, self._barrier = board, barrier

    def all_gather_obj(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait(LIMIT)
        found = list(self._board)
        self._barrier.wait(LIMIT)
        return found


def a_group(ranks: int) -> list[Group]:
    board, barrier = [None] * ranks, Barrier(ranks)
    return [Group(rank, board, barrier) for rank in range(ranks)]


def exchange(buffer: Any, rank: int) -> tuple[list[float], list[float]]:
    """Two ranks with an expert each; return what came and what came back."""
    import torch

    x = torch.full((2, 16), float(rank + 1), dtype=torch.bfloat16)
    ids = torch.tensor([[0], [1]])  # expert e is rank e's
    _, _, per_expert, _, _ = buffer.get_dispatch_layout(ids, 2)
    rows, *_, handle, _ = buffer.dispatch(
        x, num_tokens_per_expert=per_expert, topk_idx=ids, topk_weights=torch.ones(2, 1)
    )
    out, _, _ = buffer.combine(rows * (10 if rank else 1), handle)
    return rows[:, 0].tolist(), out[:, 0].tolist()


def main(rank: int, folder: str) -> None:
    import torch.distributed as dist

    import fabric_moe.deep_ep

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    fabric_moe.deep_ep.install(max_tokens=16, timeout=LIMIT)
    import deep_ep  # type: ignore[import-not-found]

    buffer = deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=1 << 30)
    print(exchange(buffer, rank), flush=True)
    sys.stdin.readline()  # rank 1 stays until rank 0, which serves the store, is gone
    buffer.destroy()
    print("left", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
