"""Kernels of tokens that travel through the engine, on a GPU, when something is wrong: what a stand-in cannot run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from moe_cases import Case, compute, dispatch, run_steps, settle, view_of

from fabric_core import BadRange, TransferEngine
from fabric_moe import MoeGroup, RankLost, StepError, Table
from fabric_moe.gpu_nic.generation import NicGeneration

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or a torch without CUDA"),
]

CASE = Case(ranks=3, experts=6, topk=3, hidden=16, tokens=[5], device="cuda:0", more={"timeout": 60.0})


@pytest.fixture
def joined() -> Iterator[Callable[[Case], list[MoeGroup]]]:
    """Opens the ranks of a case on this thread, and on one stream: all send before one waits."""
    made: list[MoeGroup] = []
    with TransferEngine.open("cuda:0") as one, TransferEngine.open("cuda:0") as two:

        def join(case: Case) -> list[MoeGroup]:
            made.extend(
                MoeGroup.open_many(
                    [one, two], case.config, range(case.ranks), Table(), device=case.device, through="engine"
                )
            )
            assert all(isinstance(group.generation, NicGeneration) for group in made)
            return made[-case.ranks :]

        yield join
        for group in made:
            group.close()


def go_on(group: MoeGroup, step: Any) -> None:
    """The three halves after dispatch_send, whatever comes of them."""
    view = group.dispatch_recv(step).contiguous()
    group.combine_send(view, torch.zeros((view.rows, 16), dtype=torch.bfloat16, device="cuda:0"))
    group.combine_recv(step)


def all_name(groups: list[MoeGroup], rank: int) -> None:
    for group in groups:
        with pytest.raises(RankLost) as lost:
            settle(CASE, group)
        assert lost.value.ranks == (rank,)


def test_a_rank_that_does_not_come_is_named(joined: Any) -> None:
    case = Case(**{**vars(CASE), "more": {"timeout": 0.5}})
    groups = joined(case)
    steps = [dispatch(case, group, 0) for group in groups[:2]]
    for group, step in zip(groups, steps, strict=False):
        group.dispatch_recv(step).contiguous()
    all_name(groups[:2], 2)


def test_who_leaves_in_the_middle_is_named_long_before_the_limit(joined: Any) -> None:
    groups = joined(CASE)
    steps = [dispatch(CASE, group, 0) for group in groups]
    groups[2].close()
    began = time.monotonic()
    for group, step in zip(groups[:2], steps, strict=False):
        go_on(group, step)
    all_name(groups[:2], 2)
    assert time.monotonic() - began < 30  # by the note, not by the limit


def test_a_view_that_is_too_small_ends_all(joined: Any) -> None:
    groups = joined(CASE)
    steps = [dispatch(CASE, group, 0) for group in groups]
    groups[0].dispatch_recv(steps[0]).contiguous(capacity=1)
    for group, step in zip(groups[1:], steps[1:], strict=True):
        go_on(group, step)
    with pytest.raises(BadRange, match="capacity is 1"):
        settle(CASE, groups[0])
    all_name(groups[1:], 0)


def test_discard(joined: Any) -> None:
    groups = joined(CASE)
    steps = [dispatch(CASE, group, 0) for group in groups]
    views = [view_of(CASE, group.dispatch_recv(step)) for group, step in zip(groups, steps, strict=True)]
    groups[2].discard(steps[2])
    for group, view in zip(groups[:2], views, strict=False):
        group.combine_send(view, compute(CASE, view))
    for group, step in zip(groups, steps, strict=True):
        group.combine_recv(step)
        with pytest.raises(StepError, match=r"ranks \[2\] discarded"):
            settle(CASE, group)
    assert run_steps(CASE, groups, 2, 1) == 6
