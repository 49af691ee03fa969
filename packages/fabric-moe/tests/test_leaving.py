"""Leaving: at the end of a job, in the middle of a step, after something went wrong; and what cannot be joined."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from moe_between import between
from moe_cases import Case, compute, dispatch, finish, run_steps, same, view_of, wanted

from fabric_core import BackendError, TransferEngine
from fabric_moe import MoeGroup, RankLost, Table
from fabric_moe.generation import ROWS, SUMS

CASE = Case(ranks=3, experts=6, topk=3, hidden=16, tokens=[5, 4, 6], more={"timeout": 60.0})


@pytest.fixture
def alone() -> Iterator[list[TransferEngine]]:
    """An engine for each rank, as processes have it."""
    engines = [TransferEngine.open() for _ in range(3)]
    yield engines
    for engine in engines:
        engine.close()


def returned(case: Case, groups: Sequence[MoeGroup]) -> list[Any]:
    """Steps whose sums were sent by all."""
    steps = [dispatch(case, group, 0) for group in groups]
    views = [view_of(case, group.dispatch_recv(step)) for group, step in zip(groups, steps, strict=True)]
    for group, view in zip(groups, views, strict=True):
        group.combine_send(view, compute(case, view))
    return steps


def test_who_has_done_its_part_may_leave(
    way: str, alone: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 leaves, with its engine, while rank 1 still waits for the sums of rank 2: that is no loss."""
    groups = MoeGroup.open_many(alone, CASE.config, range(3), Table())
    one = groups[1].generation
    expect, tried = one.expect, []
    third = between(groups[2], lambda kind, ranks: [rank for rank in ranks if rank != 1 or kind != SUMS])

    def watched(slot: int, kind: int, count: int, peers: Sequence[str]) -> Any:
        tried.append(len(peers))
        if len(tried) == 2:  # rank 0 is known to be gone: now rank 2 gets to it
            third.send_dropped()
        return expect(slot, kind, count, peers)

    steps = returned(CASE, groups)
    assert same(finish(CASE, groups[0], steps[0], 0), wanted(CASE, 0, 0))
    groups[0].close()
    alone[0].close()
    monkeypatch.setattr(one, "expect", watched)
    assert same(finish(CASE, groups[1], steps[1], 0), wanted(CASE, 1, 0))
    assert tried == [3, 1]  # then for rank 2 alone
    step = dispatch(CASE, groups[1], 1)
    with pytest.raises(RankLost) as lost:  # but for what it has not done it is missed
        groups[1].dispatch_recv(step)
    assert lost.value.ranks == (0,)


class Owed:
    """A write that is on its way until somebody waits for it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @property
    def done(self) -> bool:
        return "wait" in self.calls

    def wait(self, timeout: float) -> None:
        self.calls.append("wait")

    def cancel(self) -> None:
        self.calls.append("cancel")


@pytest.mark.parametrize("how", ["close", "regroup"])
def test_what_is_owed_leaves_before_the_rank_does(opened: Any, how: str) -> None:
    """Sums of a finished step that are still on their way are not cancelled."""
    groups = opened(CASE)
    assert run_steps(CASE, groups, 1) == 3
    owed = Owed()
    groups[0].generation.transfers[0].append(owed)
    if how == "close":
        groups[0].close()
    else:
        groups[0].regroup_begin([0, 1, 2])
    assert owed.calls[0] == "wait"


def test_a_write_of_the_last_step_arrives_late(alone: list[TransferEngine]) -> None:
    """The rank that it comes from has left by then."""
    with TransferEngine.open(faults="delay=200ms") as slow:
        groups = MoeGroup.open_many([slow, *alone], CASE.config, range(3), Table())
        steps = returned(CASE, groups)
        assert same(finish(CASE, groups[0], steps[0], 0), wanted(CASE, 0, 0))
        groups[0].close()
    for group, step in zip(groups[1:], steps[1:], strict=True):
        assert same(finish(CASE, group, step, 0), wanted(CASE, group.rank, 0))
        group.close()


@pytest.mark.parametrize("half", ["dispatch", "combine"])
def test_who_wants_no_result_may_leave(opened: Any, half: str) -> None:
    """After what its experts made was sent, or where only the dispatch was wanted: nobody misses it for that."""
    groups = opened(CASE)
    steps = returned(CASE, groups) if half == "combine" else [dispatch(CASE, group, 0) for group in groups]
    if half == "dispatch":
        groups[0].dispatch_recv(steps[0])
    groups[0].close()
    for group, step in zip(groups[1:], steps[1:], strict=True):
        if half == "combine":
            assert same(finish(CASE, group, step, 0), wanted(CASE, group.rank, 0))
        else:
            late = [1, 2]
            assert group.notes.read(lambda: late) is None  # noqa: B023
            view = group.dispatch_recv(step).compact()
            group.combine_send(view, view.tensor())
    if half == "dispatch":
        with pytest.raises(RankLost, match="rank 0 gave up step 1"):
            groups[1].combine_recv(steps[1])


def test_rows_that_wait_for_room_leave_before_the_rank_does(way: str, opened: Any) -> None:
    """Rank 0 has sent its sums, wants no result, and leaves; most of its tokens wait for turns at the others."""
    case = Case(
        ranks=3, experts=6, topk=3, hidden=16, tokens=[9, 8, 7], routing="robin",
        more={"timeout": 20.0, "private_tokens": 0, "private_max": 0, "shared_rows": 3},
    )  # fmt: skip
    groups = opened(case)
    steps = [dispatch(case, group, 0) for group in groups]
    view = view_of(case, groups[0].dispatch_recv(steps[0]))
    groups[0].combine_send(view, compute(case, view))
    found: list[Any] = []

    def others() -> None:
        for group, step in zip(groups[1:], steps[1:], strict=True):
            view = view_of(case, group.dispatch_recv(step))
            group.combine_send(view, compute(case, view))
        found.extend(finish(case, group, step, 0) for group, step in zip(groups[1:], steps[1:], strict=True))

    thread = threading.Thread(target=others)
    assert steps[0].owes_rows()
    thread.start()
    groups[0].close()
    thread.join()
    assert all(same(result, wanted(case, rank, 0)) for rank, result in enumerate(found, 1))
    assert len(found) == 2


def test_who_leaves_in_the_middle_says_so(opened: Any) -> None:
    """Long before the timeout: whoever waits hears it."""
    groups = opened(CASE)
    steps = [dispatch(CASE, group, 0) for group in groups]
    groups[1].close()
    view = view_of(CASE, groups[0].dispatch_recv(steps[0]))  # for which it has done its part
    groups[0].combine_send(view, compute(CASE, view))
    with pytest.raises(RankLost, match="rank 1 gave up step 1 because of rank 1") as lost:
        groups[0].combine_recv(steps[0])
    assert lost.value.ranks == (1,)


def test_who_gave_up_and_went_is_not_the_culprit(way: str, alone: list[TransferEngine]) -> None:
    """Rank 2's rows for rank 1 are lost. Rank 1 gives up and is gone, with its engine, when rank 0 comes to wait."""
    groups = MoeGroup.open_many(alone, CASE.config, range(3), Table())
    between(groups[2], lambda kind, ranks: [rank for rank in ranks if kind != ROWS or rank != 1])
    steps = [dispatch(CASE, group, 0) for group in groups]
    view = view_of(CASE, groups[0].dispatch_recv(steps[0]))
    groups[0].combine_send(view, compute(CASE, view))
    with pytest.raises(RankLost) as lost:
        groups[1].dispatch_recv(steps[1], timeout=1.0)
    assert lost.value.ranks == (2,)
    groups[1].close()
    alone[1].close()
    with pytest.raises(RankLost, match="rank 1 gave up step 1 because of rank 2") as lost:
        groups[0].combine_recv(steps[0])
    assert lost.value.ranks == (2,)


def test_an_error_of_the_engine_is_told_to_the_others(way: str, opened: Any) -> None:
    groups = opened(CASE)

    def broken(kind: int | None, ranks: list[int]) -> list[int]:
        if kind == ROWS:
            raise BackendError("the NIC is broken")
        return ranks

    between(groups[1], broken)
    step, _ = dispatch(CASE, groups[0], 0), dispatch(CASE, groups[2], 0)
    with pytest.raises(BackendError):
        dispatch(CASE, groups[1], 0)
    with pytest.raises(RankLost, match="rank 1 gave up step 1 because of rank 1"):
        groups[0].dispatch_recv(step)


def test_the_second_phase_is_not_sent_twice(way: str, opened: Any) -> None:
    """It fails, in C half done, on another thread: the receiving half raises that, and sends nothing again."""
    case = Case(**{**vars(CASE), "more": {"timeout": 60.0, "private_tokens": 1, "private_max": 1}})
    groups = opened(case)
    seen: set[int] = set()
    rest: list[
        list[int]
    ] = []  # submits of the second phase; in C one for each immediate, and two ranks share an engine
    failed = threading.Event()

    def failing(kind: int | None, ranks: list[int]) -> list[int]:
        if kind == ROWS and seen.issuperset(ranks):
            rest.append(ranks)
            if len(rest) == (2 if way == "C" else 1):
                failed.set()
                raise BackendError("the NIC is broken")
        elif kind == ROWS:
            seen.update(ranks)
        return ranks

    between(groups[0], failing)
    steps = [dispatch(case, group, 0) for group in groups]
    assert failed.wait(60)
    before = len(rest)
    with pytest.raises(BackendError):
        groups[0].dispatch_recv(steps[0])
    assert len(rest) == before
