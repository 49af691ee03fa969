"""Deadlines of nothing and of much, writes that are lost, and data that come after everybody has given up."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import numpy as np
import pytest
from moe_between import between
from moe_cases import Case, compute, dispatch, finish, run_steps, same, view_of, wanted

from fabric_core import FabricError, ProtocolError, TransferEngine
from fabric_moe import MoeGroup, RankLost, StepError, Table
from fabric_moe.generation import ROWS, SUMS
from fabric_moe.layout import HEAD_TYPE

CASE = Case(ranks=3, experts=7, topk=3, hidden=16, tokens=[7, 4, 5], more={"timeout": 60.0})


def start_again(groups: list[MoeGroup]) -> None:
    for group in groups:
        group.regroup_begin(range(len(groups)))
    for group in groups:
        group.regroup_end()


def test_no_time_at_all(opened: Any) -> None:
    """A timeout of 0 takes what is there, and names who is not."""
    groups = opened(CASE)
    steps = [dispatch(CASE, group, 0) for group in groups]
    views = [view_of(CASE, group.dispatch_recv(step)) for group, step in zip(groups, steps, strict=True)]
    for group, view in zip(groups[:2], views[:2], strict=True):
        group.combine_send(view, compute(CASE, view))
    with pytest.raises(RankLost) as lost:
        groups[0].combine_recv(steps[0], timeout=0)
    assert 2 in lost.value.ranks
    start_again(groups)
    assert run_steps(CASE, groups, 2) == 6
    steps = [dispatch(CASE, group, 2) for group in groups]
    for group, step in zip(groups, steps, strict=True):
        view = view_of(CASE, group.dispatch_recv(step, timeout=1e9))
        group.combine_send(view, compute(CASE, view))
    for group, step in zip(groups, steps, strict=True):
        assert same(finish(CASE, group, step, 2), wanted(CASE, group.rank, 2))


@pytest.mark.parametrize(("kind", "half"), [(ROWS, "dispatch"), (SUMS, "combine")])
def test_a_write_that_is_lost_is_missed(way: str, opened: Any, kind: int, half: str) -> None:
    """Rank 1's write to rank 0 does not happen. Rank 0 names rank 1, and takes what lies there for nothing."""
    case = CASE
    groups = opened(case)
    assert run_steps(case, groups, 2) == 6  # so that both slots hold rows and sums of steps before
    between(groups[1], lambda which, ranks: [rank for rank in ranks if which != kind or rank != 0])
    steps = [dispatch(case, group, 2) for group in groups]
    if half == "dispatch":
        with pytest.raises(RankLost) as lost:
            groups[0].dispatch_recv(steps[0], timeout=1.0)
    else:
        for group, step in zip(groups, steps, strict=True):
            view = view_of(case, group.dispatch_recv(step))
            group.combine_send(view, compute(case, view))
        with pytest.raises(RankLost) as lost:
            groups[0].combine_recv(steps[0], timeout=1.0)
    assert 1 in lost.value.ranks  # alone, unless the machine stood still meanwhile
    start_again(groups)
    assert run_steps(case, groups, 4) == 12


def test_rows_of_a_later_turn_that_are_lost_are_missed(way: str, opened: Any) -> None:
    """Where they would lie, rows of the same step lie, which came in the turn before: they do not pass for them."""
    case = Case(
        ranks=3, experts=3, topk=3, hidden=16, tokens=[9], routing="robin",
        more={"timeout": 60.0, "private_tokens": 0, "private_max": 0, "shared_rows": 3},
    )  # fmt: skip
    groups = opened(case)
    assert run_steps(case, groups, 1) == 3
    sent: list[int] = []

    def first_only(kind: int | None, ranks: list[int]) -> list[int]:
        if kind == ROWS and 0 in ranks:
            sent.append(0)
        return [rank for rank in ranks if rank != 0 or kind != ROWS or len(sent) == 1]

    between(groups[1], first_only)
    steps = [dispatch(case, group, 1) for group in groups]
    with pytest.raises(RankLost) as lost:
        groups[0].dispatch_recv(steps[0], timeout=2.0)
    assert len(sent) == 2
    assert lost.value.ranks == (1,)


def test_sums_of_another_step_are_refused(way: str, opened: Any) -> None:
    groups = opened(CASE)
    gen = groups[1].generation
    stands = between(groups[1], lambda which, ranks: [rank for rank in ranks if which != SUMS])
    steps = [dispatch(CASE, group, 0) for group in groups]
    for group, step in zip(groups, steps, strict=True):
        view = view_of(CASE, group.dispatch_recv(step))
        group.combine_send(view, compute(CASE, view))
    for _, _, write in stands.dropped:
        np.ndarray((), HEAD_TYPE, gen.outbound.memory, write.src)["step"] = 99
    stands.send_dropped()
    with pytest.raises(ProtocolError, match="sums of rank 1 are of generation 0, step 99"):
        groups[0].combine_recv(steps[0])


def test_what_comes_too_late_is_not_taken_for_new(way: str, opened: Any) -> None:
    """Rank 2 writes its rows of the old generation after the others began a new one, with the same number of step."""
    groups = opened(CASE)
    late, held = groups[2].generation, []
    if late.proxy is None:
        post = late.post
        late.post = lambda *write: held.append(partial(post, *write))
    else:
        for half in ("send_counts", "send_rows"):
            call = getattr(late.proxy, half)
            setattr(late.proxy, half, lambda slot, call=call: held.append(partial(call, slot)))
    steps = [dispatch(CASE, group, 0) for group in groups]
    for group, step in zip(groups[:2], steps[:2], strict=True):
        with pytest.raises(RankLost):
            group.dispatch_recv(step, timeout=0.2)
    for group in groups[:2]:
        group.regroup_begin([0, 1])
    for group in groups[:2]:
        group.regroup_end()
    under_way = [dispatch(CASE, group, 1) for group in groups[:2]]
    assert held
    for write in held:  # memory and immediates of the old generation: refused, or for nobody
        with contextlib.suppress(FabricError):
            write()
    for group, step in zip(groups[:2], under_way, strict=True):
        view = view_of(CASE, group.dispatch_recv(step))
        group.combine_send(view, compute(CASE, view))
    for group, step in zip(groups[:2], under_way, strict=True):
        assert same(finish(CASE, group, step, 1), wanted(CASE, group.rank, 1, masked=[2]))
    with pytest.raises(StepError, match="a generation that is over"):  # and the old step leads nowhere
        groups[0].dispatch_recv(steps[0])
    assert groups[0].broken is None


@pytest.mark.parametrize("nics", [(1, 4, 2), (3, 1, 1)])
def test_ranks_with_different_numbers_of_nics(nics: tuple[int, ...]) -> None:
    case = Case(
        ranks=3, experts=6, topk=3, hidden=3000, tokens=[14, 9, 3], more={"private_tokens": 4, "private_max": 4}
    )
    engines = [TransferEngine.open(nics=count, local_shuffle=i) for i, count in enumerate(nics)]
    try:
        groups = MoeGroup.open_many(engines, case.config, range(3), Table())
        assert run_steps(case, groups, 2) == 6
        for group in groups:
            group.close()
    finally:
        for engine in engines:
            engine.close()
