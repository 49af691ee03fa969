"""The scheduler half: what workers are told of each step; no block is given away too early, or kept for ever."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_fakes import FakeBlocks, request, scheduled
from vllm_halves import FROM, TO, blocks, half

from fabric_kvcache.vllm.card import Card
from fabric_kvcache.vllm.scheduling import Scheduling
from fabric_kvcache.vllm.steps import Report


def received(nbytes: int = 5) -> Report:
    return Report(received={"r": (nbytes, 2, 0.5)})


# ---- sending


def test_chunks_are_announced_with_the_blocks_so_far() -> None:
    p = half(producer=True)
    one = request("r", 10, **TO)
    p.allocated(one, blocks([5, 2]), 0)
    (first,) = p.step(scheduled({"r": 6}, new=[("r", ([5, 2],), 0)])).advances
    assert (first.first, first.end, first.total, first.blocks, first.moved) == (0, 6, 10, ([5, 2],), False)
    (second,) = p.step(scheduled({"r": 4}, cached=[("r", ([9],), 6)])).advances
    assert (second.first, second.end, second.blocks) == (6, 10, ([5, 2, 9],))
    assert first.blocks == ([5, 2],)
    assert not p.step(scheduled({"r": 1}, cached=[("r", None, 10)])).advances, "tokens that are generated stay here"


def test_a_preempted_prompt_is_announced_again_from_its_new_blocks() -> None:
    p = half(producer=True)
    p.allocated(request("r", 10, **TO), blocks([5, 2]), 0)
    p.step(scheduled({"r": 6}, new=[("r", ([5, 2],), 0)]))
    assert p.step(scheduled({}, preempted=["r", "another"])).preempted == {"r"}
    (again,) = p.step(scheduled({"r": 10}, cached=[("r", ([3, 8, 6],), 0)], resumed=["r"])).advances
    assert (again.moved, again.first, again.end, again.blocks) == (True, 0, 10, ([3, 8, 6],))


def test_only_groups_that_move_are_told() -> None:
    p = half(groups=(0, 2), producer=True)
    p.allocated(request("r", 4, **TO), blocks([5], [6], [7]), 0)
    (only,) = p.step(scheduled({"r": 4}, new=[("r", ([5], [6], [7]), 0)])).advances
    assert only.blocks == ([5], [7])


def test_the_blocks_of_a_prompt_that_was_computed_are_held() -> None:
    p = half(producer=True)
    p.card = Card(engine="e", addresses=("local:a",), host="h", port=9)
    one = request("r", 4, **TO)
    p.allocated(one, blocks([5]), 0)
    p.step(scheduled({"r": 4}, new=[("r", ([5],), 0)]))
    kept, answer = p.finished(one, ([5],), well=True)
    assert kept
    assert answer is not None
    assert (answer["remote_host"], answer["remote_port"], answer["transfer_id"]) == ("h", 9, "t")
    assert (answer["do_remote_prefill"], answer["remote_block_ids"]) == (True, [[5]])
    step = p.step(scheduled({}))
    assert step.held == {"r": ("t", 7.0)}
    assert not step.dropped


@pytest.mark.parametrize("computed", [0, 2, 4])
def test_a_prefill_that_is_aborted_is_dropped(computed: int) -> None:
    p = half(producer=True)
    one = request("r", 4, **TO)
    if computed:
        p.allocated(one, blocks([5]), 0)
        p.step(scheduled({"r": computed}, new=[("r", ([5],), 0)]))
    kept, _ = p.finished(one, ([5],), well=False)
    assert kept
    assert p.busy, "the workers must hear of it though no request is left"
    assert p.step(scheduled({})).dropped["r"][0] == "t"
    assert not p.busy


def test_requests_that_are_not_sent_are_left_alone() -> None:
    p = half(producer=True)
    one = request("r", 4)
    p.allocated(one, blocks([5]), 0)
    assert not p.step(scheduled({"r": 4}, new=[("r", ([5],), 0)])).advances
    assert p.finished(one, ([5],), well=True) == (False, None)
    assert p.matched(request("q", 4, **FROM), 0) == (0, False), "this engine does not receive"


# ---- receiving


def test_a_prompt_is_asked_for_once() -> None:
    d = half(consumer=True)
    one = request("r", 10, **FROM)
    assert d.matched(one, 4) == (6, True)
    assert d.matched(one, 4) == (6, True), "no side effects"
    d.allocated(one, blocks([7, 1, 4]), 6)
    assert d.matched(one, 0) == (0, False)
    (load,) = d.step(scheduled({})).loads
    assert (load.request_id, load.want.transfer_id, load.start, load.total) == ("r", "t", 4, 10)
    assert load.blocks == ([7, 1, 4],)
    d.reported(received(), {"r"})
    d.step(scheduled({"r": 1}, new=[("r", ([7, 1, 4],), 9)]))
    d.step(scheduled({"r": 1}, cached=[("r", None, 10)]))
    assert d.matched(one, 0) == (0, False), "after a preemption it is computed here"
    assert d.finished(one, ([7, 1, 4],), well=True) == (
        False,
        {"fabric": {"bytes": 5, "writes": 2, "seconds": 0.5, "computed": 1}},
    )


def test_a_prompt_that_did_not_come_is_seen_to_be_computed() -> None:
    d = half(consumer=True)
    one = request("r", 10, **FROM)
    d.allocated(one, blocks([7, 1, 4]), 10)
    d.reported(None, {"r"})
    d.step(scheduled({"r": 8}, new=[("r", ([7, 1],), 0)]))
    d.step(scheduled({"r": 2}, cached=[("r", ([4],), 8)]))
    assert d.finished(one, ([7, 1, 4],), well=True)[1]["fabric"] == {
        "bytes": 0,
        "writes": 0,
        "seconds": 0,
        "computed": 10,
    }


def test_what_ranks_say_is_added_up() -> None:
    d = half(consumer=True)
    one = request("r", 10, **FROM)
    d.allocated(one, blocks([7]), 10)
    d.reported(received(5), set())
    d.reported(received(6), {"r"})
    assert d.finished(one, ([7],), well=True)[1]["fabric"]["bytes"] == 11


def test_parameters_that_make_no_sense_are_computed_here(caplog: pytest.LogCaptureFixture) -> None:
    d = half(consumer=True)
    one = request("r", 10, do_remote_prefill=True, transfer_id="t")
    for _ in range(3):
        assert d.matched(one, 0) == (0, False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "remote_host" in caplog.text


def test_an_abort_while_receiving_is_passed_on() -> None:
    d = half(consumer=True)
    one = request("r", 10, **FROM)
    d.allocated(one, blocks([7]), 10)
    d.step(scheduled({}))
    assert d.finished(one, ([7],), well=False) == (False, None), "vLLM keeps its blocks itself until r is named"
    assert d.busy
    assert d.step(scheduled({})).cancelled == {"r"}


def lost(d: Scheduling, ranks: int) -> tuple[Any, FakeBlocks]:
    one, taken = request("r", 10, **FROM), blocks([0, 7, 1])
    d._manager.held["r"] = taken
    d.allocated(one, taken, 10)
    d.step(scheduled({}))
    d.reported(Report(unsafe={"r": 1}), set())
    d.reported(Report(unsafe={"r": ranks - 1}) if ranks > 1 else None, {"r"})
    for block in taken.blocks[0]:
        block.ref_cnt -= 1  # vLLM gives them back now
    return one, taken


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_into_which_writes_may_land_are_nobodys(ranks: int) -> None:
    d = half(consumer=True)
    _, taken = lost(d, ranks)
    null, *mine = taken.blocks[0]
    assert [block.ref_cnt for block in mine] == [1, 1]
    assert null.ref_cnt == 0, "vLLM's null block is not touched"
    for left in range(ranks - 1, -1, -1):
        assert d.busy, "the workers are asked on"
        d.reported(Report(safe={"r": 1}), set())
        assert [block.ref_cnt for block in mine] == [min(left, 1)] * 2
    assert not d.busy


def test_blocks_that_are_safe_in_time_are_not_kept() -> None:
    d = half(consumer=True)
    one, taken = request("r", 10, **FROM), blocks([7])
    d._manager.held["r"] = taken
    d.allocated(one, taken, 10)
    d.reported(Report(unsafe={"r": 1}), set())
    d.reported(Report(safe={"r": 1}), {"r"})
    assert taken.blocks[0][0].ref_cnt == 1
    assert not d._kept
    d.step(scheduled({}))
    assert not d.busy
