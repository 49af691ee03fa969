"""Nodes: calls that are wrong, more tokens than a rank passes on, and who is named when one does not come."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from moe_cases import Case, given

from fabric_core import BadRange, ConfigError, ProtocolError, TransferEngine
from fabric_moe import MoeConfig, NodeGroup, RankLost, StepError, Table, kernels

CASE = Case(ranks=4, experts=8, topk=4, hidden=16, tokens=[5], more={"timeout": 2.0})


def opened(case: Case, engines: Sequence[TransferEngine], node: int, **more: Any) -> list[NodeGroup]:
    return NodeGroup.open_many(engines, case.config, range(case.ranks), Table(), node=node, **more)


def sent(case: Case, groups: Sequence[NodeGroup]) -> list[Any]:
    inputs = [given(case, g.rank, 0) for g in groups]
    return [g.dispatch_send(m.x, m.ids, m.weights, scales=m.scales) for g, m in zip(groups, inputs, strict=True)]


def test_who_waits_for_one_that_waits_hears_whom_it_missed(engines: list[TransferEngine]) -> None:
    """Rank 3 is silent. Rank 0 waits for rank 1 already when that one begins to wait for rank 3: both name rank 3."""
    groups = opened(CASE, engines, 2)
    steps = sent(CASE, groups[:3])
    groups[0].dispatch_forward(steps[0])
    waits, found = threading.Event(), []

    def first() -> None:
        waits.set()
        with pytest.raises(RankLost) as lost:
            groups[0].dispatch_recv(steps[0])
        found.append(lost.value.ranks)

    thread = threading.Thread(target=first)
    thread.start()
    waits.wait()
    with pytest.raises(RankLost) as lost:
        groups[1].dispatch_forward(steps[1])
    thread.join()
    assert [*found, lost.value.ranks] == [(3,), (3,)]
    for group in groups:
        group.close()


def test_a_send_that_is_interrupted_is_heard_of_in_the_node_too(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in rank 0's way to the other node. Rank 1 waits for it inside the node, and names it at once."""
    groups = opened(Case(**{**vars(CASE), "more": {"timeout": 20.0}}), engines, 2)
    steps = sent(CASE, groups[1:])

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "pack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sent(CASE, groups[:1])
    groups[1].dispatch_forward(steps[0])
    with pytest.raises(RankLost, match="as another rank has noted") as lost:
        groups[1].dispatch_recv(steps[0])
    assert lost.value.ranks == (0,)
    for group in groups:
        group.close()


def test_more_than_a_rank_passes_on_ends_the_group_everywhere(engines: list[TransferEngine]) -> None:
    """It is an error with a cure on the rank that it happens to; the others hear at once which one that is."""
    case = Case(**{**vars(CASE), "more": {"timeout": 60.0}})
    groups = opened(case, engines, 2, forward_tokens=9)
    local = np.zeros((5, 4), np.int64)  # of ranks 0 and 2 all to node 0, so that rank 0 has ten tokens to pass on
    x = given(case, 0, 0).x
    steps = [g.dispatch_send(x, local[: 0 if g.rank % 2 else 5]) for g in groups]
    with pytest.raises(BadRange, match="rank 0 has 10 tokens to pass on in one step, forward_tokens is 9: raise it"):
        groups[0].dispatch_forward(steps[0])
    with pytest.raises(BadRange, match="forward_tokens is 9"):  # and no further call
        groups[0].dispatch_send(x, local)
    groups[1].dispatch_forward(steps[1])
    with pytest.raises(RankLost) as mate:
        groups[1].dispatch_recv(steps[1])
    other, third = groups[2:], steps[2:]
    for group, step in zip(other, third, strict=True):
        group.dispatch_forward(step)
    for group, step in zip(other, third, strict=True):
        view = group.dispatch_recv(step).compact()
        group.combine_send(view, view.tensor())
    for group, step in zip(other, third, strict=True):
        group.combine_forward(step)
    with pytest.raises(RankLost) as far:
        groups[2].combine_recv(steps[2])
    assert (mate.value.ranks, far.value.ranks) == ((0,), (0,))
    for group in groups:
        group.close()


def test_orders_of_calls_that_differ_end_the_group(engines: list[TransferEngine]) -> None:
    case = Case(**{**vars(CASE), "more": {"timeout": 60.0}})
    groups = opened(case, engines, 2)
    groups[1].rail.next_step = 3  # as if it had made two calls that rank 3 did not make
    steps = sent(case, groups)
    with pytest.raises(ProtocolError, match="same calls in the same order"):
        groups[3].dispatch_forward(steps[3])
    with pytest.raises(ProtocolError):
        sent(case, groups[3:])
    groups[2].dispatch_forward(steps[2])
    with pytest.raises(
        RankLost, match="because of rank 3, as another rank has noted"
    ) as lost:  # its mate hears at once
        groups[2].dispatch_recv(steps[2])
    assert lost.value.ranks == (3,)
    for group in groups:
        group.close()


def test_live_tokens(engines: list[TransferEngine]) -> None:
    groups = opened(CASE, engines, 2)
    inputs = [given(CASE, g.rank, 0) for g in groups]
    steps = [g.dispatch_send(m.x, m.ids, live=g.rank) for g, m in zip(groups, inputs, strict=True)]
    for group, step in zip(groups, steps, strict=True):
        assert step.rail.route.tokens == group.rank
        group.dispatch_forward(step)
    with pytest.raises(BadRange, match="live=6"):
        groups[0].dispatch_send(inputs[0].x, inputs[0].ids, live=6)
    for group in groups:
        group.close()


def test_wrong_calls(engines: list[TransferEngine]) -> None:
    case = Case(**{**vars(CASE), "topk": 2, "scale_bytes": 3})
    groups = opened(case, engines, 2)
    mine = given(case, 0, 0)
    with pytest.raises(BadRange, match="scales=None"):
        groups[0].dispatch_send(mine.x, mine.ids, mine.weights)
    with pytest.raises(BadRange, match="token 0 names expert 8"):
        groups[0].dispatch_send(mine.x, np.full((5, 2), 8), scales=mine.scales)
    steps = sent(case, groups)
    with pytest.raises(StepError, match="dispatch_forward"):
        groups[0].dispatch_recv(steps[0])
    groups[0].dispatch_forward(steps[0])
    with pytest.raises(StepError, match="dispatch_recv"):  # not twice
        groups[0].dispatch_forward(steps[0])
    for group in groups:
        group.close()
    shape: dict[str, Any] = {"ranks": 4, "experts": 8, "topk": 2, "hidden": 16, "max_tokens": 4}
    changes: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"node": 3}, {}, "node=3"), ({}, {"experts": 3}, "a node without experts"),
        ({}, {"out_dtype": "float64"}, "float64"), ({"forward_tokens": 0}, {}, "forward_tokens=0: from 1 to 8"),
        ({"ranks": [4]}, {}, "rank=4: ranks go from 0 to 3"),
    ]  # fmt: skip
    for call, change, words in changes:
        with pytest.raises(ConfigError, match=words):
            NodeGroup.open_many(
                engines, MoeConfig(**{**shape, **change}), board=Table(), **{"node": 2, "ranks": [0], **call}
            )
