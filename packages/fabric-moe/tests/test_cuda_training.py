"""Gradients through the kernels: the same as plain torch has them on the host."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import train_process as ranks
from torch.utils.checkpoint import checkpoint

from fabric_core import ConfigError, TransferEngine
from fabric_moe import MoeGroup, Table
from fabric_moe.training import backward_config, moe_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or a torch without CUDA"),
]

NEAR = {"rtol": 1e-4, "atol": 1e-5}


class Plain(torch.nn.Module):
    """The layer without ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([ranks.expert(e) for e in range(ranks.EXPERTS)])

    def forward(self, x: Any, ids: Any, weights: Any) -> Any:
        rows = []
        for t in range(len(x)):
            row = torch.zeros(ranks.HIDDEN)
            for j in range(ranks.TOPK):
                if ids[t, j] >= 0:
                    row = row + weights[t, j] * self.experts[int(ids[t, j])](x[t : t + 1])[0]
            rows.append(row)
        return torch.stack(rows)


def by_plain_torch(step: int) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Of each rank: its result, and the gradients of its tokens and weights; and those of all parameters."""
    layer = Plain()
    found, total = [], []
    for rank in range(ranks.RANKS):
        x, ids, weights = ranks.inputs(rank, step)
        x.requires_grad_()
        weights.requires_grad_()
        out = layer(x, ids, weights)
        total.append((out.sin() * (1 + rank)).sum())
        found.append([out, x, weights])
    sum(total).backward()  # type: ignore[union-attr]
    own = [[out.detach(), x.grad, weights.grad] for out, x, weights in found]
    return own, [p.grad if p.grad is not None else torch.zeros_like(p) for p in layer.parameters()]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a if a.numel() else torch.zeros_like(b), b, **NEAR)


def test_gradients_of_two_ranks_are_those_of_plain_torch(tmp_path: Path) -> None:
    """As processes that share the GPU. Three steps: both slots of each group are used again."""
    context, steps = multiprocessing.get_context("forkserver"), 3
    started = []
    for rank in range(ranks.RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=ranks.serve, args=(rank, f"file:{tmp_path}/board", "cuda:0", steps, theirs), daemon=True
        )
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        for step in range(steps):
            found = []
            for _, pipe in started:
                assert pipe.poll(90), "a rank said nothing"
                found.append([torch.from_numpy(one) for one in pipe.recv()])
            own, parameters = by_plain_torch(step)
            for mine, wanted in zip(found, own, strict=True):
                for a, b in zip(mine[:3], wanted, strict=True):
                    close(a, b)
            for a, b in zip([p for mine in found for p in mine[3:]], parameters, strict=True):
                close(a, b)
        for process, _ in started:
            process.join(60)
            assert process.exitcode == 0
    finally:
        for process, pipe in started:
            process.kill()
            process.join(60)
            pipe.close()


def alone(engines: list[TransferEngine], kind: str, job: str, device: str = "cuda:0") -> MoeGroup:
    config = ranks.shape(1, "float32")
    config = backward_config(config) if kind == "back" else config
    return MoeGroup.open_many(engines, config, [0], Table(), job=job, device=device)[0]


def test_recomputing_on_a_gpu(engines: list[TransferEngine]) -> None:
    """One rank by itself, with and without checkpointing: the same bits. Its backward asks the GPU for nothing."""
    tokens, back = alone(engines, "tokens", "t"), alone(engines, "back", "b")
    layer = moe_layer(tokens, back, [ranks.expert(e) for e in range(ranks.EXPERTS)]).to("cuda:0")
    found = []
    for recompute in (False, True):
        layer.zero_grad()
        x, ids, weights = (one.to("cuda:0") for one in ranks.inputs(0, 5))
        x.requires_grad_()
        weights.requires_grad_()
        out = checkpoint(layer, x, ids, weights, use_reentrant=False) if recompute else layer(x, ids, weights)
        loss = out.sin().sum()
        if not recompute:
            torch.cuda.set_sync_debug_mode("error")
        try:
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append([x.grad, weights.grad, *(p.grad for p in layer.parameters())])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
    tokens.close()
    back.close()


def test_both_groups_must_be_on_one_device(engines: list[TransferEngine]) -> None:
    tokens, back = alone(engines, "tokens", "t"), alone(engines, "back", "b", "cpu")
    with pytest.raises(ConfigError, match="tokens are on cuda:0, their gradients on cpu"):
        moe_layer(tokens, back, [])
    tokens.close()
    back.close()
