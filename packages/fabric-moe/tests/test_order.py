"""Orders of calls, arguments that are wrong, and what the caller must never see: garbage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from moe_cases import Case, compute, dispatch, finish, given, run_steps, same, view_of, wanted

from fabric_core import BadRange, ProtocolError
from fabric_moe import MoeGroup, RankLost, StepError
from fabric_moe.dispatch import send_rest

CASE = Case(ranks=2, experts=5, topk=3, hidden=16, tokens=[7, 4])


def halves(case: Case, groups: list[MoeGroup], steps: list[Any]) -> None:
    views = [view_of(case, group.dispatch_recv(step)) for group, step in zip(groups, steps, strict=True)]
    for group, view in zip(groups, views, strict=True):
        group.combine_send(view, compute(case, view))


def check(case: Case, groups: list[MoeGroup], steps: list[Any], number: int) -> None:
    for group, step in zip(groups, steps, strict=True):
        assert same(finish(case, group, step, number), wanted(case, group.rank, number))


def test_two_steps_under_way_and_the_next_send_before_the_receive(opened: Any) -> None:
    """d d c c, and the send of n + 1 before the receive of n; results of both are right."""
    groups = opened(CASE)
    one = [dispatch(CASE, group, 0) for group in groups]
    two = [dispatch(CASE, group, 1) for group in groups]
    halves(CASE, groups, one)
    halves(CASE, groups, two)
    check(CASE, groups, two, 1)
    check(CASE, groups, one, 0)
    assert run_steps(CASE, groups, 3, first=2) == 6


def test_a_third_step_is_refused_and_nothing_breaks(opened: Any) -> None:
    groups = opened(CASE)
    steps = [[dispatch(CASE, group, n) for group in groups] for n in range(2)]
    with pytest.raises(StepError, match="depth above 2"):
        dispatch(CASE, groups[0], 2)
    for number, step in enumerate(steps):
        halves(CASE, groups, step)
        check(CASE, groups, step, number)
    assert run_steps(CASE, groups, 1, first=2) == 2


def test_halves_out_of_order_are_refused(opened: Any) -> None:
    groups = opened(CASE)
    steps = [dispatch(CASE, group, 0) for group in groups]
    with pytest.raises(StepError, match="combine_recv"):
        groups[0].combine_recv(steps[0])
    views = [group.dispatch_recv(step).contiguous() for group, step in zip(groups, steps, strict=True)]
    with pytest.raises(StepError, match="dispatch_recv"):
        groups[0].dispatch_recv(steps[0])
    with pytest.raises(StepError, match="another group"):
        groups[1].combine_send(views[0], compute(CASE, views[0]))
    for group, view in zip(groups, views, strict=True):
        group.combine_send(view, compute(CASE, view))
    with pytest.raises(StepError, match="combine_send"):
        groups[0].combine_send(views[0], compute(CASE, views[0]))
    with pytest.raises(StepError, match="before combine_send"):
        views[0].received.masked()
    check(CASE, groups, steps, 0)
    with pytest.raises(StepError, match="done"):
        groups[0].combine_recv(steps[0])


def test_wrong_arguments_are_refused_and_the_step_goes_on(opened: Any) -> None:
    groups = opened(CASE)
    mine = given(CASE, 0, 0)
    with pytest.raises(BadRange, match="rows of 34 bytes"):
        groups[0].dispatch_send(torch.zeros((7, 17), dtype=torch.bfloat16), mine.ids)
    with pytest.raises(BadRange, match="x has 6 rows"):
        groups[0].dispatch_send(mine.x[:6], mine.ids)
    with pytest.raises(BadRange, match="on meta"):
        groups[0].dispatch_send(torch.zeros((7, 16), dtype=torch.bfloat16, device="meta"), mine.ids)
    steps = [dispatch(CASE, group, 0) for group in groups]
    views = [group.dispatch_recv(step).contiguous() for group, step in zip(groups, steps, strict=True)]
    y = compute(CASE, views[0])
    with pytest.raises(BadRange, match="y has"):
        groups[0].combine_send(views[0], y[:-1])
    for group, view in zip(groups, views, strict=True):
        group.combine_send(view, compute(CASE, view))
    with pytest.raises(BadRange, match="out has 3 rows"):
        groups[0].combine_recv(steps[0], out=torch.zeros((3, 16), dtype=torch.bfloat16))
    wrong: Any = [0.0]
    with pytest.raises(BadRange, match="out= is a list"):
        groups[0].combine_recv(steps[0], out=wrong)
    with pytest.raises(BadRange, match="accumulate"):
        groups[0].combine_recv(steps[0], accumulate=True)
    with pytest.raises(BadRange, match="timeout=-1"):
        groups[0].combine_recv(steps[0], timeout=-1)
    check(CASE, groups, steps, 0)
    again = [dispatch(CASE, group, 1) for group in groups]
    received = groups[0].dispatch_recv(again[0])
    with pytest.raises(BadRange, match="alignment=0"):
        received.contiguous(0)


def test_capacity_that_is_too_small_names_the_expert(opened: Any) -> None:
    case = Case(ranks=2, experts=4, topk=1, hidden=16, tokens=[6], routing="one-expert")
    groups = opened(case)
    steps = [dispatch(case, group, 0) for group in groups]
    received = groups[1].dispatch_recv(steps[1])
    with pytest.raises(BadRange, match="expert 3 has 12 rows, capacity is 11"):
        received.masked(11)
    with pytest.raises(BadRange, match="rank 0 sent 6 rows"):
        received.rank_major(5)
    assert received.masked(12).tokens.shape == (2, 12, 32)


def test_no_garbage_in_padding_whatever_lay_there(opened: Any) -> None:
    """All memory is poisoned before; padding rows are zero, and the bytes around what was received are not touched."""
    case = Case(ranks=2, experts=5, topk=2, hidden=16, tokens=[5, 3], alignment=8)
    groups = opened(case)
    for group in groups:
        group.generation.inbound.rows["token"] = 0xAB
        group.generation.inbound.rows["stamp"] = 0xFFFFFFFF
    steps = [dispatch(case, group, 0) for group in groups]
    for group, step in zip(groups, steps, strict=True):
        received = group.dispatch_recv(step)
        for view in (received.contiguous(8), received.masked(9), received.rank_major(), received.compact()):
            flat = view.tokens.reshape(view.rows, -1)
            assert not flat[view.source < 0].any()
            sources = received.sources()
            for row in np.nonzero(view.source >= 0)[0]:
                number = int(view.source[row])
                sender = int(sources[number])
                plan = steps[sender].route
                token = plan.token[plan.starts[group.rank] + number - received.starts[sender]]
                assert flat[row].tobytes() == given(case, sender, 0).x[token].view(torch.uint8).numpy().tobytes()
        assert step.places is not None
        arrived = step.places.slots(group.rank)
        rest = np.setdiff1d(np.arange(group.generation.inbound.rows.shape[1]), arrived)
        assert (group.generation.inbound.rows[step.slot]["token"][rest] == 0xAB).all()


def test_nan_and_inf_stay_in_their_rows(opened: Any) -> None:
    groups = opened(CASE)
    x = [given(CASE, r, 0).x.clone() for r in range(2)]
    x[0][2, 5], x[1][1, 0] = float("nan"), float("inf")
    ids = [given(CASE, r, 0).ids for r in range(2)]
    steps = [group.dispatch_send(x[group.rank], ids[group.rank]) for group in groups]
    halves(CASE, groups, steps)
    for group, step in zip(groups, steps, strict=True):
        out = group.combine_recv(step).float()
        bad = (~torch.isfinite(out)).any(dim=1).nonzero().ravel().tolist()
        assert bad == [[2], [1]][group.rank]


def test_live_tokens_and_weights_of_none(opened: Any) -> None:
    groups = opened(CASE)
    steps = []
    for group in groups:
        mine = given(CASE, group.rank, 0)
        steps.append(group.dispatch_send(mine.x, mine.ids, live=3))
    halves(CASE, groups, steps)
    for group, step in zip(groups, steps, strict=True):
        full = wanted(Case(**{**vars(CASE), "weighted": False}), group.rank, 0)
        assert same(group.combine_recv(step), full[:3])


def test_the_same_bits_a_hundred_times_and_in_any_batch(opened: Any) -> None:
    """Over arrival orders (deliveries are shuffled), and batch invariant: a token alone has the same bits."""
    case = Case(ranks=4, experts=8, topk=4, hidden=24, tokens=[6])
    groups = opened(case)
    first: list[torch.Tensor] = []
    for _ in range(100):
        steps = [dispatch(case, group, 0) for group in groups]
        halves(case, groups, steps)
        found = [group.combine_recv(step) for group, step in zip(groups, steps, strict=True)]
        first = first or found
        assert all(same(a, b) for a, b in zip(first, found, strict=True))
    alone = [given(case, r, 0) for r in range(4)]
    steps = [g.dispatch_send(m.x[2:3], m.ids[2:3], m.weights[2:3]) for g, m in zip(groups, alone, strict=True)]
    halves(case, groups, steps)
    for group, step, full in zip(groups, steps, first, strict=True):
        assert same(group.combine_recv(step), full[2:3])


def test_discard_frees_the_step_and_says_so(opened: Any) -> None:
    groups = opened(CASE)
    steps = [dispatch(CASE, group, 0) for group in groups]
    for group, step in zip(groups, steps, strict=True):
        group.dispatch_recv(step)
        group.discard(step)
    for group, step in zip(groups, steps, strict=True):
        with pytest.raises(StepError, match="discarded step 1"):
            group.combine_recv(step)
    assert run_steps(CASE, groups, 3, first=1) == 6


def test_a_step_that_nobody_joins_ends_in_time(opened: Any) -> None:
    groups = opened(CASE)
    step = dispatch(CASE, groups[0], 0)
    with pytest.raises(RankLost) as caught:
        groups[0].dispatch_recv(step, timeout=0.05)
    assert caught.value.ranks == (1,)
    with pytest.raises(RankLost):  # broken until it is made anew
        dispatch(CASE, groups[0], 1)
    for group in groups:
        group.regroup_begin([0, 1])
    for group in groups:
        group.regroup_end()
    assert run_steps(CASE, groups, 3) == 6


def test_sequence_numbers_wrap(opened: Any) -> None:
    """Stamps of rows are 32 bits of a 64-bit step number."""
    groups = opened(CASE)
    for group in groups:
        group.next_step = (1 << 32) - 3
    assert run_steps(CASE, groups, 6) == 12
    assert groups[0].next_step == (1 << 32) + 3


@pytest.mark.parametrize("what", ["private", "counts", "total"])
def test_counts_that_no_rank_can_have_are_refused(way: str, opened: Any, what: str) -> None:
    """What a peer says about its rows decides where memory is read and written: it is checked."""
    case = Case(ranks=3, experts=6, topk=1, hidden=16, tokens=[7, 4, 5])
    groups = opened(case)
    steps = [dispatch(case, group, 0) for group in groups]
    inbound = groups[1].generation.inbound
    assert steps[1].counts is not None
    steps[1].counts.wait(10)
    if what == "private":
        inbound.heads[steps[1].slot]["private"][0] = 129
    elif what == "counts":
        inbound.counts[steps[1].slot][0, 1] = 8
    else:  # each is possible, all together are more than 7 tokens have with an expert each
        inbound.counts[steps[1].slot][0] = [7, 0, 1]
    with steps[1].lock:  # the callback thread has done its part, or will find what we find
        steps[1].places = None
    with pytest.raises(ProtocolError, match="rank 0 says"):
        send_rest(groups[1], steps[1])
