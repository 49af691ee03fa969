"""One rank of a layer with gradients on a GPU, as a process: kernels that wait for each other take turns there."""

from __future__ import annotations

from typing import Any

import torch

from fabric_core import TransferEngine
from fabric_core.bootstrap import open_board
from fabric_moe import MoeConfig, MoeGroup
from fabric_moe.training import backward_config, moe_layer

RANKS, EXPERTS, TOPK, HIDDEN, TOKENS = 2, 5, 3, 24, (7, 4)


def shape(ranks: int, kind: str = "float32") -> MoeConfig:
    return MoeConfig(
        ranks=ranks, experts=EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=8, dtype=kind, out_dtype=kind, timeout=60.0
    )


def expert(number: int) -> torch.nn.Module:
    torch.manual_seed(number)
    return torch.nn.Sequential(torch.nn.Linear(HIDDEN, 9), torch.nn.Tanh(), torch.nn.Linear(9, HIDDEN))


def inputs(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn((TOKENS[rank], HIDDEN), generator=dice)
    ids = torch.randint(-1, EXPERTS, (TOKENS[rank], TOPK), generator=dice)  # the same expert twice, too
    return x, ids, torch.randn((TOKENS[rank], TOPK), generator=dice)


def train(layer: Any, rank: int, step: int, device: str) -> list[torch.Tensor]:
    """Forward and backward; the result, and the gradients of tokens, weights and parameters."""
    layer.zero_grad()
    x, ids, weights = (one.to(device) for one in inputs(rank, step))
    x.requires_grad_()
    weights.requires_grad_()
    out = layer(x, ids, weights)
    (out.sin() * (1 + rank)).sum().backward()
    given = [out.detach(), x.grad, weights.grad, *(p.grad for p in layer.experts.parameters())]
    return [torch.zeros(0) if one is None else one.cpu() for one in given]


def serve(rank: int, board: str, device: str, steps: int, pipe: Any) -> None:
    """Send the list of `train` for each step."""
    with TransferEngine.open() as engine:
        config = shape(RANKS)
        tokens = MoeGroup.open(engine, config, rank, open_board(board), job="tokens", device=device, timeout=60)
        back = MoeGroup.open(
            engine, backward_config(config), rank, open_board(board), job="back", device=device, timeout=60
        )
        layer = moe_layer(tokens, back, [expert(e) for e in config.experts_of(rank)]).to(device)
        for step in range(steps):
            pipe.send([one.numpy() for one in train(layer, rank, step, device)])
        tokens.check()
        back.check()
        tokens.close()
        back.close()
