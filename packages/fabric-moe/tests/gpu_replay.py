"""A graph of whole steps that draws its own inputs and checks its own results, all on the GPU.

Each replay: a counter goes up; tokens, routing, weights and the live count of each rank are made from it; the four
halves of all ranks; the same computed by plain torch operations; numbers that differ are counted.
"""

from __future__ import annotations

from typing import Any

import torch
from moe_cases import Case

from fabric_moe import MoeGroup
from fabric_moe.reference import owner_of

EXPERTS, TOPK, HIDDEN, TOKENS = 32, 4, 256, 24


class Replay:
    """`opened`: makes groups of a case, as the fixture does. `ranks` of them share a stream."""

    def __init__(self, opened: Any, ranks: int) -> None:
        case = Case(ranks=ranks, experts=EXPERTS, topk=TOPK, hidden=HIDDEN, tokens=[TOKENS], device="cuda:0")
        self.groups: list[MoeGroup] = opened(case)
        self.ranks = ranks
        dev = torch.device("cuda:0")
        self.turn = torch.zeros(1, dtype=torch.int64, device=dev)
        self.wrong = torch.zeros(1, dtype=torch.int64, device=dev)
        self.seen = torch.zeros(1, dtype=torch.int64, device=dev)
        self.where = torch.arange(ranks * TOKENS * TOPK, device=dev).reshape(ranks * TOKENS, TOPK)
        self.grain = torch.arange(ranks * TOKENS * HIDDEN, device=dev).reshape(ranks * TOKENS, HIDDEN)
        self.owner = torch.tensor([owner_of(e, EXPERTS, ranks) for e in range(EXPERTS)] + [-1], device=dev)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # once outside: first calls load modules
            self.step()
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.step()
            self.step()  # both slots
        torch.cuda.synchronize()

    def drawn(self, cells: Any, salt: int, below: int) -> Any:
        """Numbers from the counter and the cell: 0 <= n < below."""
        mixed = (cells + 1) * 2654435761 + self.turn * 40503 + salt * 97
        mixed = (mixed ^ (mixed >> 15)) * 2246822519
        return ((mixed ^ (mixed >> 13)) & 0x7FFFFFFF) % below

    def expert(self, e: Any, x: Any) -> Any:
        """What expert e [...] makes of x [..., HIDDEN]: bfloat16, each row by itself."""
        return (x.float() * (1 + e[..., None] % 7) / 4 + e[..., None] % 3).bfloat16()

    def step(self) -> None:
        r, t = self.ranks, TOKENS
        self.turn += 1
        x = (self.drawn(self.grain, 1, 4001).float() / 500 - 4).bfloat16()
        ids = self.drawn(self.where, 2, EXPERTS + 3) - 3
        ids = torch.where(ids < 0, -1, ids)
        weights = self.drawn(self.where, 3, 2001).float() / 1000 - 1
        live = self.drawn(torch.arange(r, device=x.device), 4, t + 1).int()
        steps = [
            group.dispatch_send(x[i * t : (i + 1) * t], ids[i * t : (i + 1) * t], weights[i * t : (i + 1) * t],
                                live=live[i : i + 1])
            for i, group in enumerate(self.groups)
        ]  # fmt: skip
        views = [group.dispatch_recv(step).contiguous() for group, step in zip(self.groups, steps, strict=True)]
        for group, view in zip(self.groups, views, strict=True):
            place = torch.arange(view.rows, device=x.device)
            local = torch.searchsorted(view.offsets[1:], place, right=True).clamp(max=view.received.experts - 1)
            used = (place < view.offsets[-1])[:, None]
            y = torch.where(used, self.expert(local + view.received.first_expert, view.tensor()), float("nan"))
            group.combine_send(view, y.bfloat16())
            self.seen += view.offsets[-1:]
        found = torch.cat([group.combine_recv(step) for group, step in zip(self.groups, steps, strict=True)])
        alive = torch.arange(t, device=x.device).repeat(r) < live.repeat_interleave(t)
        wanted = torch.where(alive[:, None], self.plain(x, ids, weights), 0)
        same = found.view(torch.int16) == wanted.view(torch.int16)
        self.wrong += (~same).sum()

    def plain(self, x: Any, ids: Any, weights: Any) -> Any:
        home = self.owner[ids]  # -1 is the last entry, which is -1
        total = torch.zeros(x.shape, device=x.device)
        for d in range(self.ranks):
            part = torch.zeros_like(total)
            for j in range(TOPK):
                term = self.expert(ids[:, j], x).float() * weights[:, j, None]
                part = part + torch.where((home[:, j] == d)[:, None], term, 0)
            total = total + part.bfloat16().float()
        return total.bfloat16()

    def run(self, replays: int) -> int:
        """Return how many numbers were wrong."""
        for i in range(replays):
            self.graph.replay()
            if i % 500 == 499:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        for group in self.groups:
            group.check()
        return int(self.wrong)

    def rows(self) -> int:
        """Rows that experts have computed."""
        return int(self.seen)
