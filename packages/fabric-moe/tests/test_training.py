"""Gradients through dispatch and combine: against plain torch, and by finite differences in float64."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fabric_core import ConfigError, TransferEngine
from fabric_moe import MoeConfig, MoeGroup, Table
from fabric_moe.training import backward_config, moe_layer

RANKS, EXPERTS, TOPK, HIDDEN = 3, 5, 3, 6


def config(kind: str) -> MoeConfig:
    return MoeConfig(
        ranks=RANKS, experts=EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=8, dtype=kind, out_dtype=kind, timeout=30.0
    )


def expert(number: int, kind: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(number)
    return torch.nn.Sequential(torch.nn.Linear(HIDDEN, 4), torch.nn.Tanh(), torch.nn.Linear(4, HIDDEN)).to(kind)


def inputs(rank: int, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(100 + rank)
    tokens = [4, 0, 3][rank]
    x = torch.randn((tokens, HIDDEN), generator=dice, dtype=kind, requires_grad=True)
    ids = torch.randint(-1, EXPERTS, (tokens, TOPK), generator=dice)
    weights = torch.randn((tokens, TOPK), generator=dice, dtype=kind, requires_grad=True)
    return x, ids, weights


class Job:
    """Layers of all ranks, each driven by a thread of its own."""

    def __init__(self, kind: str) -> None:
        self.kind = getattr(torch, kind)
        shape, table = config(kind), Table()
        self.engines = [TransferEngine.open() for _ in range(2)]
        tokens = MoeGroup.open_many(self.engines, shape, range(RANKS), table, job="tokens")
        back = MoeGroup.open_many(self.engines, backward_config(shape), range(RANKS), table, job="gradients")
        self.layers = [
            moe_layer(f, b, [expert(e, self.kind) for e in shape.experts_of(f.rank)])
            for f, b in zip(tokens, back, strict=True)
        ]

    def on_all(self, call: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(call, range(RANKS), timeout=60))

    def close(self) -> None:
        for layer in self.layers:
            layer.tokens.close()
            layer.gradients.close()
        for engine in self.engines:
            engine.close()


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(request.param)
    yield made
    made.close()


def plain(experts: list[torch.nn.Module], x: Any, ids: Any, weights: Any) -> Any:
    """The same layer without ranks."""
    rows = []
    for t in range(len(x)):
        row = torch.zeros(HIDDEN, dtype=x.dtype)
        for j in range(TOPK):
            if ids[t, j] >= 0:
                row = row + weights[t, j] * experts[int(ids[t, j])](x[t : t + 1])[0]
        rows.append(row)
    return torch.stack(rows) if rows else x * 1 + weights.sum()  # an input without rows has a gradient without rows


@pytest.mark.parametrize("job", ["float64", "float32"], indirect=True)
def test_gradients_are_those_of_plain_torch(job: Job) -> None:
    given = [inputs(rank, job.kind) for rank in range(RANKS)]

    def run(rank: int) -> Any:
        x, ids, weights = given[rank]
        out = job.layers[rank](x, ids, weights)
        (out.sin() * (1 + rank)).sum().backward()
        return out.detach()

    found = job.on_all(run)
    experts = [expert(e, job.kind) for e in range(EXPERTS)]
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if job.kind == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    copies = [inputs(rank, job.kind) for rank in range(RANKS)]
    outs = [plain(experts, *copy) for copy in copies]
    sum((out.sin() * (1 + rank)).sum() for rank, out in enumerate(outs)).backward()
    for rank in range(RANKS):
        torch.testing.assert_close(found[rank], outs[rank].detach(), **tolerance)
        torch.testing.assert_close(given[rank][0].grad, copies[rank][0].grad, **tolerance)
        torch.testing.assert_close(given[rank][2].grad, copies[rank][2].grad, **tolerance)
    mine = [p for layer in job.layers for p in layer.experts.parameters()]
    theirs = [p for module in experts for p in module.parameters()]
    for a, b in zip(mine, theirs, strict=True):
        assert (a.grad is None or not a.grad.any()) if b.grad is None else True
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, **tolerance)


@pytest.mark.parametrize("job", ["float64"], indirect=True)
def test_recomputing_gives_the_same_gradients(job: Job) -> None:
    """Activation checkpointing: backward runs the layer's forward once more, on all ranks, before its own backward."""
    found: list[list[Any]] = []
    for recompute in (False, True):
        given = [inputs(rank, job.kind) for rank in range(RANKS)]

        def run(rank: int, given: list[Any] = given, recompute: bool = recompute) -> None:
            x, ids, weights = given[rank]
            layer = job.layers[rank]
            layer.zero_grad()
            out = checkpoint(layer, x, ids, weights, use_reentrant=False) if recompute else layer(x, ids, weights)
            (out.sin() * (1 + rank)).sum().backward()

        job.on_all(run)
        gradients = [p.grad for layer in job.layers for p in layer.experts.parameters()]
        found.append([t.grad for one in given for t in (one[0], one[2])] + gradients)
    for first, second in zip(*found, strict=True):
        assert (first is None) == (second is None)
        assert first is None or torch.equal(first, second)
    assert sum(g is not None and bool(g.any()) for g in found[1]) > 3


@pytest.mark.parametrize("job", ["float64"], indirect=True)
def test_experts_that_are_frozen(job: Job) -> None:
    """All of one, and one parameter of the others: gradients of the rest, and of what goes in, are what they were."""
    found: list[list[Any]] = []
    for frozen in (False, True):
        for e, module in enumerate(module for layer in job.layers for module in layer.experts):
            module.zero_grad()
            for i, p in enumerate(module.parameters()):
                p.requires_grad_(not frozen or (e != 1 and i != 2))
        given = [inputs(rank, job.kind) for rank in range(RANKS)]

        def run(rank: int, given: list[Any] = given) -> None:
            job.layers[rank](*given[rank]).sin().sum().backward()

        job.on_all(run)
        every = [p for layer in job.layers for p in layer.experts.parameters()]
        found.append([t.grad for one in given for t in (one[0], one[2])] + [p.grad for p in every])
        assert [p.grad is None for p in every if not p.requires_grad] == [True] * (8 if frozen else 0)  # 4 + 4 x 1
    assert sum(g is not None for g in found[0]) > sum(g is not None for g in found[1]) > 6
    for free, kept in zip(*found, strict=True):
        assert kept is None or torch.equal(free, kept)


@pytest.mark.parametrize("job", ["float64"], indirect=True)
def test_tokens_beyond_an_experts_capacity_are_dropped_by_an_id_of_none(job: Job) -> None:
    """A caller's capacity: what is beyond gets -1; it adds nothing, and no gradient flows through it."""
    given = [inputs(rank, job.kind) for rank in range(RANKS)]
    capacity = 1  # tokens of each rank for each expert
    for _, ids, _ in given:
        for e in range(EXPERTS):
            rows, slots = torch.nonzero(ids == e, as_tuple=True)
            ids[rows[capacity:], slots[capacity:]] = -1

    def run(rank: int) -> Any:
        x, ids, weights = given[rank]
        out = job.layers[rank](x, ids, weights)
        out.square().sum().backward()
        return out.detach()

    found = job.on_all(run)
    experts = [expert(e, job.kind) for e in range(EXPERTS)]
    for rank in range(RANKS):
        x, ids, weights = given[rank]
        a, b = x.detach().requires_grad_(), weights.detach().requires_grad_()
        out = plain(experts, a, ids, b)
        out.square().sum().backward()
        torch.testing.assert_close(found[rank], out.detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(x.grad, a.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(weights.grad, b.grad, rtol=1e-10, atol=1e-12)
        assert not weights.grad[ids < 0].any()


@pytest.mark.parametrize("job", ["float64"], indirect=True)
def test_finite_differences(job: Job) -> None:
    """All ranks vary their own inputs at once, which is allowed: an output depends on its own rank's tokens only."""
    meet = threading.Barrier(RANKS)

    def run(rank: int) -> bool:
        dice = torch.Generator().manual_seed(rank)
        x = torch.randn((2, HIDDEN), generator=dice, dtype=job.kind, requires_grad=True)
        ids = torch.randint(-1, EXPERTS, (2, TOPK), generator=dice)
        weights = torch.randn((2, TOPK), generator=dice, dtype=job.kind, requires_grad=True)
        meet.wait(30)
        # the same number of calls on every rank: shapes are the same, and fast_mode=False visits each input in turn
        return bool(torch.autograd.gradcheck(lambda a, b: job.layers[rank](a, ids, b), (x, weights)))

    assert job.on_all(run) == [True] * RANKS


def test_groups_that_do_not_fit(engines: list[TransferEngine]) -> None:
    shape, table = config("float32"), Table()
    one = MoeGroup.open_many(engines, shape, range(RANKS), table, job="a")
    two = MoeGroup.open_many(engines, shape, range(RANKS), table, job="b")
    with pytest.raises(ConfigError, match="backward_config"):
        moe_layer(one[0], two[0], [])
    raw = MoeGroup.open_many(engines, replace(shape, dtype="int8"), range(RANKS), table, job="d")
    with pytest.raises(ConfigError, match="dtype='int8' has no gradients"):
        moe_layer(raw[0], two[0], [])
    back = MoeGroup.open_many(engines, backward_config(shape), range(RANKS), table, job="c")
    with pytest.raises(ConfigError, match="holds 2 experts, 0 modules"):
        moe_layer(one[0], back[0], [])
    for group in (*one, *two, *back, *raw):
        group.close()
