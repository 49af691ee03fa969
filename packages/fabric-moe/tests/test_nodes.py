"""A token once for each node: bits as the reference has them, rows as few as there are nodes, faults with names."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from moe_cases import ROUTINGS, Case, compute, expert, given, raw, same, view_of

from fabric_core import TransferEngine
from fabric_moe import NodeGroup, RankLost, Table
from fabric_moe.reference import owner_of, reference


def opened(case: Case, engines: list[TransferEngine], node: int, **more: Any) -> list[NodeGroup]:
    return NodeGroup.open_many(engines, case.config, range(case.ranks), Table(), node=node, **more)


def wanted(case: Case, node: int, rank: int, number: int) -> torch.Tensor:
    """The reference within each node, and then over the nodes, whose sums are the "experts" of the second one."""
    mine = given(case, rank, number)
    sums = []
    for n in range(case.ranks // node):
        home = torch.tensor([owner_of(e, case.experts, case.ranks) // node for e in range(case.experts)] + [-1])
        ids = torch.where(home[mine.ids] == n, mine.ids, -1)
        sums += reference(
            [raw(case, mine)], [ids], [mine.weights], lambda e, rows: expert(case, e, rows), ranks=case.ranks,
            experts=case.experts, hidden=case.hidden, out_dtype=case.config.wire, wire_dtype=case.config.wire,
            weighted=case.weighted,
        )  # fmt: skip
    total = torch.zeros((len(mine.x), case.hidden))
    for part in sums:
        total = total + part.float()
    if case.accumulate:
        total = total + mine.added.float()
    return total.to(getattr(torch, case.out_dtype))


def run(case: Case, groups: list[NodeGroup], node: int, steps: int) -> int:
    compared = 0
    for number in range(steps):
        inputs = [given(case, g.rank, number) for g in groups]
        under_way = [
            g.dispatch_send(m.x, m.ids, m.weights, scales=m.scales) for g, m in zip(groups, inputs, strict=True)
        ]
        for g, step in zip(groups, under_way, strict=True):
            g.dispatch_forward(step)
        for g, step in zip(groups, under_way, strict=True):
            view = view_of(case, g.dispatch_recv(step))
            view.received.first_expert += g.first_of_node  # experts of the tests know their number among all
            y = compute(case, view)
            view.received.first_expert -= g.first_of_node
            g.combine_send(view, y, weighted=case.weighted)
        for g, step in zip(groups, under_way, strict=True):
            g.combine_forward(step)
        for g, step, m in zip(groups, under_way, inputs, strict=True):
            out = m.added.clone() if case.accumulate else None
            found = g.combine_recv(step, out=out, accumulate=case.accumulate)
            assert same(found, wanted(case, node, g.rank, number)), f"WRONG: rank {g.rank}, step {number}, {case}"
            compared += 1
    return compared


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing(engines: list[TransferEngine], routing: str) -> None:
    case = Case(ranks=4, experts=10, topk=4, hidden=24, tokens=[7, 0, 9, 3], routing=routing)
    groups = opened(case, engines, 2)
    assert run(case, groups, 2, 2) == 8
    for group in groups:
        group.close()


@pytest.mark.parametrize(("ranks", "node"), [(4, 1), (4, 4), (6, 2), (6, 3), (8, 4)])
def test_sizes_of_nodes(engines: list[TransferEngine], ranks: int, node: int) -> None:
    case = Case(
        ranks=ranks, experts=ranks * 2 + 3, topk=5, hidden=20, tokens=[6, 2], dtype="float8_e4m3fn", scale_bytes=5,
        wire_dtype="float32", out_dtype="bfloat16", view="compact", accumulate=True,
    )  # fmt: skip
    groups = opened(case, engines, node)
    assert run(case, groups, node, 2) == 2 * ranks
    for group in groups:
        group.close()


@pytest.mark.parametrize("view", ["masked", "rank-major"])
@pytest.mark.parametrize("weighted", [True, False])
def test_views(engines: list[TransferEngine], view: str, weighted: bool) -> None:
    case = Case(ranks=4, experts=8, topk=3, hidden=16, tokens=[5], view=view, weighted=weighted, out_dtype="float32")
    groups = opened(case, engines, 2)
    assert run(case, groups, 2, 2) == 8
    for group in groups:
        group.close()


def test_many_ranks_on_sim() -> None:
    """Eight nodes on engines that deliver in any order; as many ranks as FABRIC_MOE_RANKS says, 24 if nothing."""
    ranks = int(os.environ.get("FABRIC_MOE_RANKS", "24"))
    case = Case(ranks=ranks, experts=ranks * 2 + 5, topk=6, hidden=16, tokens=[2, 0, 3, 1], routing="minus-random")
    engines = [TransferEngine.open(backend="sim", sim_seed=i) for i in range(8)]
    try:
        groups = opened(case, engines, ranks // 8)
        assert run(case, groups, ranks // 8, 1) == ranks
        for group in groups:
            group.close()
    finally:
        for engine in engines:
            engine.close()


def test_a_token_crosses_once_for_each_node(engines: list[TransferEngine]) -> None:
    case = Case(ranks=8, experts=32, topk=8, hidden=16, tokens=[20])
    groups = opened(case, engines, 4)
    inputs = [given(case, g.rank, 0) for g in groups]
    steps = [g.dispatch_send(m.x, m.ids, m.weights) for g, m in zip(groups, inputs, strict=True)]
    for g, step, m in zip(groups, steps, inputs, strict=True):
        nodes = [{owner_of(e, 32, 8) // 4 for e in row if e >= 0} for row in m.ids.tolist()]
        assert step.rail.route.counts.tolist() == [sum(n in row for row in nodes) for n in range(2)]
        ranks = [{owner_of(e, 32, 8) for e in row if e >= 0} for row in m.ids.tolist()]
        assert step.rail.route.counts.sum() < sum(len(row) for row in ranks)  # which a MoeGroup would send
        g.dispatch_forward(step)
        assert step.view is not None
        arrived = step.view.received
        sources = arrived.sources()
        for row in range(len(arrived)):  # each from the rank of the same place, with its own bytes
            sender = int(sources[row]) * 4 + g.rank % 4
            plan = steps[sender].rail.route
            token = plan.token[plan.starts[g.rank // 4] + row - arrived.starts[sources[row]]]
            assert step.view.tokens[row].tobytes() == inputs[sender].x[token].view(torch.uint8).numpy().tobytes()
    for group in groups:
        group.close()


def test_a_rank_that_does_not_come_is_named_as_all_count(engines: list[TransferEngine]) -> None:
    """Rank 3 (place 1 of node 1) sends nothing. Rank 1 misses it on its rail; rank 0 hears of it from rank 1."""
    case = Case(ranks=4, experts=8, topk=4, hidden=16, tokens=[5], more={"timeout": 60.0})
    groups = opened(case, engines, 2)
    steps = {}
    for rank in (0, 1, 2):
        mine = given(case, rank, 0)
        steps[rank] = groups[rank].dispatch_send(mine.x, mine.ids, mine.weights)
    for rank in (0, 2):
        groups[rank].dispatch_forward(steps[rank], timeout=60.0)
    with pytest.raises(RankLost, match="rank 3") as error:
        groups[1].dispatch_forward(steps[1], timeout=1.0)
    assert 3 in error.value.ranks  # alone, unless the machine stood still meanwhile
    with pytest.raises(RankLost, match="rank 3") as error:
        groups[0].dispatch_recv(steps[0], timeout=60.0)
    assert 3 in error.value.ranks
    assert groups[0].broken is error.value
    with pytest.raises(RankLost):  # and no further call
        groups[0].dispatch_recv(steps[0], timeout=60.0)
    for group in groups:
        group.close()
