"""Tokens on a GPU that travel through the engine, without a GPU: all but the kernels themselves is real."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import nic_kernels
import nic_standin
import nic_words
import numpy as np
import pytest
from moe_cases import ROUTINGS, VIEWS, Case, compute, dispatch, run_steps, same, view_of, wanted

from fabric_core import BadRange, FabricError, ProtocolError, TransferEngine
from fabric_moe import MoeGroup, RankLost, StepError, Table, kernels
from fabric_moe.membership import meet

pytestmark = pytest.mark.skipif(kernels.NATIVE is None, reason="fabric-moe was built without its C part")

ROUTED = Case(ranks=4, experts=10, topk=4, hidden=24, tokens=[9, 0, 7, 4], more={"timeout": 60.0})


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> nic_standin.StandIn:
    return nic_standin.install(monkeypatch.setattr)


@pytest.fixture
def joined(device: nic_standin.StandIn, engines: list[TransferEngine]) -> Iterator[Callable[[Case], list[MoeGroup]]]:
    """Opens the ranks of a case on this thread; afterwards no memory of the stand-in is held."""
    made: list[MoeGroup] = []

    def join(case: Case) -> list[MoeGroup]:
        made.extend(
            MoeGroup.open_many(engines, case.config, range(case.ranks), Table(), device="cuda:0", through="engine")
        )
        return made[-case.ranks :]

    yield join
    for group in made:
        group.close()
    assert device.held == 0


def received(group: MoeGroup, step: Any) -> None:
    """Receive, and raise what went wrong, whenever it did."""
    group.dispatch_recv(step).compact()
    group.check()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing(joined: Any, routing: str, view: str) -> None:
    case = Case(**{**vars(ROUTED), "routing": routing, "view": view})
    assert run_steps(case, joined(case), 3) == 12


@pytest.mark.parametrize("private", [0, 1, 3, 100])
def test_rows_beyond_the_private_ones_find_their_places(joined: Any, private: int) -> None:
    case = Case(
        ranks=3, experts=7, topk=3, hidden=16, tokens=[9, 5, 8], scale_bytes=3, alignment=4,
        more={"private_tokens": 0, "private_max": private, "depth": 3, "timeout": 60.0},
    )  # fmt: skip
    groups = joined(case)
    assert run_steps(case, groups, 7) == 21
    assert groups[0].generation.layout.private == min(private, 9)


@pytest.mark.parametrize(("out", "wire"), [("float16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16")])
def test_sums(joined: Any, out: str, wire: str) -> None:
    for weighted, accumulate in ((True, True), (False, False)):
        case = Case(
            ranks=2, experts=4, topk=4, hidden=10, tokens=[6], out_dtype=out, wire_dtype=wire, weighted=weighted,
            accumulate=accumulate, more={"timeout": 60.0},
        )  # fmt: skip
        assert run_steps(case, joined(case), 2) == 4


def test_more_rows_than_there_is_room_for(joined: Any) -> None:
    """All ranks find out from the counts alike, and nobody writes beyond its own rows."""
    case = Case(**{
        **vars(ROUTED), "routing": "one-rank", "more": {"private_tokens": 0, "private_max": 2, "shared_rows": 3}
    })  # fmt: skip
    groups = joined(case)
    steps = [dispatch(case, group, 0) for group in groups]
    found: set[type] = set()
    for group, step in zip(groups, steps, strict=True):
        with pytest.raises((BadRange, RankLost), match=r"ranks \[3\] would get more rows|came from rank 3") as first:
            received(group, step)  # the second: another rank has said so before
        with pytest.raises(type(first.value)):
            dispatch(case, group, 1)
        found.add(type(first.value))
    assert BadRange in found


def test_a_rank_that_does_not_come_is_named(joined: Any) -> None:
    case = Case(**{**vars(ROUTED), "more": {"timeout": 0.3}})
    groups = joined(case)
    steps = [dispatch(case, group, 0) for group in groups[:3]]
    for group, step in zip(groups, steps, strict=False):
        with pytest.raises(RankLost) as lost:
            received(group, step)
        assert lost.value.ranks == (3,)


@pytest.mark.parametrize("absent", ["pack", "combine_bfloat16"])
def test_a_rank_that_stops_half_way_is_named_by_all(joined: Any, device: Any, absent: str) -> None:
    """Its counts have come, but not its rows; its rows, but not its sums."""
    more = {"timeout": 1.0, "private_max": 2, "private_tokens": 0}
    case = Case(**{**vars(ROUTED), "tokens": [9, 6, 7, 4], "more": more})
    groups = joined(case)
    late = groups[1]
    steps = []
    for group in groups:
        device.skip = {"pack"} if group is late and absent == "pack" else set()
        steps.append(dispatch(case, group, 0))
    views = [view_of(case, group.dispatch_recv(step)) for group, step in zip(groups, steps, strict=True)]
    for group, view in zip(groups, views, strict=True):
        if absent == "pack":
            continue
        device.skip = {absent} if group is late else set()
        group.combine_send(view, compute(case, view))
    for group, step in zip(groups, steps, strict=True):
        if absent != "pack":
            group.combine_recv(step)
        with pytest.raises(RankLost) as lost:
            group.check()
        assert lost.value.ranks == (1,)


def test_discard(joined: Any) -> None:
    case = Case(**{**vars(ROUTED), "tokens": [5]})
    groups = joined(case)
    steps = [dispatch(case, group, 0) for group in groups]
    views = [view_of(case, group.dispatch_recv(step)) for group, step in zip(groups, steps, strict=True)]
    groups[2].discard(steps[2])
    for group, view in zip(groups, views, strict=True):
        if group is not groups[2]:
            group.combine_send(view, compute(case, view))
    for group, step in zip(groups, steps, strict=True):
        group.combine_recv(step)
        with pytest.raises(StepError, match=r"ranks \[2\] discarded"):
            group.check()
    assert run_steps(case, groups, 2, 1) == 8


def test_who_leaves_after_its_part_takes_nothing_along(joined: Any) -> None:
    """The others hear that it has left, look whether something of it is missing, and go on."""
    case = Case(**{**vars(ROUTED), "tokens": [5], "more": {"timeout": 60.0}})
    groups = joined(case)
    steps = [dispatch(case, group, 0) for group in groups]
    views = [view_of(case, group.dispatch_recv(step)) for group, step in zip(groups, steps, strict=True)]
    for group, view in zip(groups, views, strict=True):
        group.combine_send(view, compute(case, view))
    for group, step in zip(groups, steps, strict=True):
        assert same(group.combine_recv(step), wanted(case, group.rank, 0))
        group.close()
    with pytest.raises(FabricError, match="closed"):
        dispatch(case, groups[0], 1)


def test_who_has_left_is_not_blamed_for_one_that_is_slow(joined: Any) -> None:
    """Rank 1 waits for rank 3, hears that rank 0 has left, and finds that nothing of rank 0 is missing."""
    case = Case(**{**vars(ROUTED), "tokens": [5], "more": {"timeout": 60.0}})
    groups = joined(case)
    steps = [dispatch(case, group, 0) for group in groups[:3]]
    waiting = threading.Thread(target=lambda: view_of(case, groups[1].dispatch_recv(steps[1])))
    waiting.start()
    groups[0].generation.report.proxy.note(0)
    mail = nic_words.Mail.from_address(groups[1].generation._memory.mail)
    deadline = time.monotonic() + 50
    while not mail.gone & 1 and time.monotonic() < deadline:
        time.sleep(0.001)  # until the note is there
    assert mail.gone == 1
    dispatch(case, groups[3], 0)
    waiting.join(50)
    assert not waiting.is_alive()
    groups[1].check()


def test_who_leaves_in_the_middle_is_named_at_once(joined: Any) -> None:
    case = Case(**{**vars(ROUTED), "tokens": [5], "more": {"timeout": 300.0}})
    groups = joined(case)
    steps = [dispatch(case, group, 0) for group in groups]
    groups[2].close()
    others = [rank for rank in range(4) if rank != 2]
    views = [view_of(case, groups[rank].dispatch_recv(steps[rank])) for rank in others]
    for view in views:
        group = groups[view.received.step.generation.rank]
        group.combine_send(view, compute(case, view))
    for rank in others:
        groups[rank].combine_recv(steps[rank])
        with pytest.raises(RankLost) as lost:
            groups[rank].check()
        assert lost.value.ranks == (2,)


def test_ids_of_masked_ranks_are_left_out(joined: Any) -> None:
    case = Case(ranks=3, experts=6, topk=2, hidden=16, tokens=[8], more={"timeout": 60.0})
    groups = joined(case)
    assert run_steps(case, groups, 1) == 3
    for group in groups[:2]:
        group.regroup_begin([0, 1])
    meet(groups[:2], 30.0)
    assert run_steps(case, groups[:2], 3, 1, masked=[2]) == 6
    assert groups[0].unreachable() > 0


def test_counts_that_no_rank_can_have_are_refused(joined: Any) -> None:
    """What another rank writes over ours is checked before a place is made of it."""
    case = Case(**{**vars(ROUTED), "more": {"timeout": 60.0}})
    groups = joined(case)
    steps = [dispatch(case, group, 0) for group in groups[1:]]
    real = nic_kernels.Slot.count

    def count(self: nic_kernels.Slot, a: Any) -> None:
        self.local.epoch[self.slot] += 1
        nic_words.array(self.c.counted, np.uint32, (4,))[:] = 1000
        self.mail.counted[self.slot] = self.local.epoch[self.slot]

    nic_kernels.Slot.count = count  # type: ignore[method-assign]
    try:
        dispatch(case, groups[0], 0)
    finally:
        nic_kernels.Slot.count = real  # type: ignore[method-assign]
    for group, step in zip(groups[1:], steps, strict=True):
        with pytest.raises((ProtocolError, RankLost), match=r"counts of ranks \[0\] are none|came from rank 0 at"):
            received(group, step)  # the second: another rank has said so before
