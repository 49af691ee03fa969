"""What a program does to a group in the middle of things: Ctrl-C, a fork, an engine that is closed first, no close."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from moe_cases import Case, dispatch, given, run_steps

from fabric_core import EngineClosed, FabricError, TransferEngine
from fabric_core.bootstrap import FileBoard
from fabric_moe import MoeGroup, RankLost, StepError, Table, kernels

CASE = Case(ranks=3, experts=7, topk=3, hidden=16, tokens=[7, 4, 5], more={"timeout": 60.0})


def in_a_child(call: Any) -> str:
    """What `call` raises in the child of a fork, or what it returns."""
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        try:
            said = str(call())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_a_fork_does_not_take_a_group_along(way: str, engines: list[TransferEngine], tmp_path: Path) -> None:
    """In the child every call says so, and leaving takes nothing from the parent."""
    groups = MoeGroup.open_many(engines, CASE.config, range(3), FileBoard(tmp_path))
    steps = [dispatch(CASE, group, 0) for group in groups]
    cards = sorted(path.name for path in tmp_path.iterdir())
    one, mine = groups[0], given(CASE, 0, 1)
    send = lambda: one.dispatch_send(mine.x, mine.ids, mine.weights)  # noqa: E731
    for call in (send, lambda: one.dispatch_recv(steps[0]), lambda: one.mask([1])):
        assert in_a_child(call).startswith(f"StepError: rank 0 of moe belongs to process {os.getpid()}: a fork ")
    assert in_a_child(lambda: [group.close() for group in groups]) == "[None, None, None]"
    assert sorted(path.name for path in tmp_path.iterdir()) == cards
    views = [group.dispatch_recv(step).contiguous() for group, step in zip(groups, steps, strict=True)]
    for group, view in zip(groups, views, strict=True):
        group.combine_send(view, view.tensor())
    for group, step in zip(groups, steps, strict=True):
        group.combine_recv(step)
    assert run_steps(CASE, groups, 3, first=1) == 9
    for group in groups:
        group.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_send_that_ends_half_way_ends_the_group(
    way: str, opened: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The counts have left, the rows have not: nobody may take a further step as if nothing had happened."""
    groups = opened(CASE)
    steps = [dispatch(CASE, group, 0) for group in groups[:2]]

    def interrupted(*_: Any) -> None:
        raise error("none left")

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "pack", interrupted)
        with pytest.raises(error):
            dispatch(CASE, groups[2], 0)
    with pytest.raises(StepError, match=r"rank 2, step 1: dispatch_send ended half-way with .*; regroup\(\)"):
        dispatch(CASE, groups[2], 0)
    with pytest.raises(RankLost, match="rank 2 gave up step 1 because of rank 2"):
        groups[0].dispatch_recv(steps[0])
    for group in groups:
        group.regroup_begin(range(3))
    for group in groups:
        group.regroup_end()
    assert run_steps(CASE, groups, 3) == 9


def test_an_engine_that_is_closed_first(way: str) -> None:
    """Each call says so, close() works, and nothing is touched that is gone."""
    engine, other = TransferEngine.open(), TransferEngine.open()
    groups = MoeGroup.open_many([engine, other, other], CASE.config, range(3), Table())
    assert run_steps(CASE, groups, 2) == 6
    steps = [dispatch(CASE, group, 2) for group in groups]
    engine.close()

    def go_on() -> None:
        view = groups[0].dispatch_recv(steps[0]).compact()
        groups[0].combine_send(view, view.tensor())

    with pytest.raises((EngineClosed, RankLost)):
        go_on()
    with pytest.raises(FabricError):
        dispatch(CASE, groups[0], 3)
    for group in groups:
        group.close()
    other.close()
