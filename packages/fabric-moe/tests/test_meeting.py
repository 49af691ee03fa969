"""Groups that open: ranks that differ, that do not come, that put nonsense on the board; and nothing stays of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from moe_cases import Case, dispatch, run_steps

from fabric_core import (
    BackendError,
    BadRange,
    ConfigError,
    DeadlineExceeded,
    FabricError,
    ProtocolError,
    TransferEngine,
)
from fabric_moe import MoeConfig, MoeGroup, StepError, Table, generation
from fabric_moe.generation import Generation

CASE = Case(ranks=2, experts=5, topk=3, hidden=16, tokens=[7, 4])
TRIO = Case(ranks=3, experts=6, topk=3, hidden=16, tokens=[5, 4, 6], more={"timeout": 60.0})


@pytest.fixture
def alone() -> Iterator[TransferEngine]:
    """An engine that nobody else uses, so that what stays there can be counted."""
    with TransferEngine.open() as engine:
        yield engine


def test_ranks_that_call_in_different_orders_are_told(opened: Any) -> None:
    groups = opened(CASE)
    groups[1].next_step = 3  # as if it had made two calls that rank 0 did not make
    steps = [dispatch(CASE, group, 0) for group in groups]
    with pytest.raises(ProtocolError, match="same calls in the same order"):
        groups[0].dispatch_recv(steps[0])
    with pytest.raises(ProtocolError):  # and the group is broken
        dispatch(CASE, groups[0], 1)


def test_shapes_that_differ_are_named(engines: list[TransferEngine]) -> None:
    table = Table()
    mine, theirs = CASE.config, MoeConfig(**{**vars_of(CASE.config), "hidden": 32})
    one = MoeGroup(engines[0], theirs, 1, table, "shapes")
    with pytest.raises(ProtocolError, match="hidden is 32 there and 16 here"):
        MoeGroup.open(engines[0], mine, 0, table, job="shapes")
    one.close()


def vars_of(config: MoeConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_a_rank_that_never_comes(engines: list[TransferEngine]) -> None:
    with pytest.raises(DeadlineExceeded, match=r"lonely\.g0\.r1"):
        MoeGroup.open(engines[0], CASE.config, 0, Table(), job="lonely", timeout=0.05)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version":9}', "x" * 1000, '{"version":1,"shape":3}'])
def test_a_card_that_is_none(engines: list[TransferEngine], text: str) -> None:
    table = Table()
    table.publish("cards.g0.r1", text)
    with pytest.raises(ProtocolError, match="rank 1"):
        MoeGroup.open(engines[0], CASE.config, 0, table, job="cards", timeout=5)


def test_groups_come_and_go_without_leaving_anything(engines: list[TransferEngine]) -> None:
    """A hundred groups, two at a time over the same engines: immediates and registrations are given back."""
    before = [(engine.stats()["inflight"], len(engine._owners)) for engine in engines]
    for i in range(50):
        table = Table()
        a = MoeGroup.open_many(engines, CASE.config, [0, 1], table, job=f"a{i}")
        b = MoeGroup.open_many(engines, CASE.config, [0, 1], table, job=f"b{i}")
        if i % 10 == 0:
            assert run_steps(CASE, a, 1) + run_steps(CASE, b, 2) == 6
        for group in (*a, *b):
            group.close()
    assert [(engine.stats()["inflight"], len(engine._owners)) for engine in engines] == before


def test_a_closed_group_is_over(opened: Any) -> None:
    groups = opened(TRIO)
    groups[0].close()
    groups[0].close()
    with pytest.raises(StepError, match="was closed: open another one"):
        groups[0].mask([1])
    with pytest.raises(FabricError, match="this group was closed"):
        dispatch(TRIO, groups[0], 0)


def test_members_that_are_none_are_refused_and_nothing_is_lost(opened: Any) -> None:
    groups = opened(TRIO)
    for call, words in [
        (lambda: groups[0].mask([7]), r"\[7\] are no members; these are \[0, 1, 2\]"),
        (lambda: groups[0].regroup_begin([0, 7]), "lie below 3"),
        (lambda: groups[0].mask([0]), "cannot leave itself out"),
        (lambda: groups[0].regroup_begin([0.0, 1]), "numbers of ranks are integers"),
    ]:
        with pytest.raises(BadRange, match=words):
            call()
    assert run_steps(TRIO, groups, 2) == 6


def test_a_board_that_fails_ends_the_group_until_it_is_made_anew(
    alone: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is full, a store that is gone: not only errors of this library end a meeting."""
    table = Table()
    groups = MoeGroup.open_many([alone], TRIO.config, range(3), table)

    def fails(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(table, "publish", fails)
        with pytest.raises(OSError, match="no space"):
            groups[0].regroup_begin(range(3))
        with pytest.raises(StepError, match=r"has not met: OSError.*; regroup\(\) on all ranks"):
            dispatch(TRIO, groups[0], 0)
    for group in groups[1:]:
        group.regroup_begin(range(3))
    with monkeypatch.context() as patch:
        patch.setattr(table, "lookup", fails)
        with pytest.raises(OSError, match="no space"):
            groups[1].regroup_end()
        with pytest.raises(StepError, match="has not met"):
            dispatch(TRIO, groups[1], 0)
    for group in groups:
        group.close()
    assert not alone._owners


def test_nothing_stays_of_ranks_that_could_not_open(alone: TransferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    table, card = Table(), Generation.card

    def broken(self: Generation) -> str:
        if self.rank == 2:
            raise BackendError("no card")
        return card(self)

    monkeypatch.setattr(Generation, "card", broken)
    with pytest.raises(BackendError, match="no card"):
        MoeGroup.open_many([alone], TRIO.config, range(3), table)
    assert table._values == {}
    assert not alone._owners


def test_memory_that_is_not_to_be_had(alone: TransferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with what was wanted, before pages are touched that the machine does not have."""
    huge = MoeConfig(ranks=1, experts=4, topk=2, hidden=1 << 24, max_tokens=1 << 24)
    with pytest.raises(BackendError, match=r"this machine has \d+ bytes.*; rank 0 wants \d+ bytes: lower max_tokens"):
        MoeGroup.open(alone, huge, 0, Table())
    monkeypatch.setattr(generation, "machine_memory", lambda: 1 << 62)
    with pytest.raises(BackendError, match=r"empty.*; rank 0 wants \d+ bytes: lower max_tokens"):
        MoeGroup.open(alone, huge, 0, Table())
    assert not alone._owners


def test_what_is_no_board_and_no_shape(alone: TransferEngine) -> None:
    wrong: list[tuple[Any, Any]] = [(TRIO.config, "file:/somewhere"), ({"ranks": 3}, Table())]
    for config, board in wrong:
        with pytest.raises(ConfigError, match="a MoeConfig is wanted, and what open_board"):
            MoeGroup.open(alone, config, 0, board)
    assert not alone._owners


def test_places_that_are_none(alone: TransferEngine) -> None:
    places: list[tuple[Any, Any]] = [(3, 0), (-1, 0), (0.0, 0), (True, 0), (0, -1), (0, "1"), (0, 1 << 32)]
    for rank, number in places:
        with pytest.raises(ConfigError, match="go from 0 to"):
            MoeGroup.open(alone, TRIO.config, rank, Table(), generation=number)
