"""Kernels on a GPU when something is wrong: ranks that do not come, ids, views, arguments; and the memory they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_cases import Case, compute, dispatch, run_steps, view_of

from fabric_core import BadRange, ConfigError
from fabric_moe import RankLost, StepError
from fabric_moe.cuda.driver import Device
from fabric_moe.cuda.layout import GpuLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or a torch without CUDA"),
]

ROUTED = Case(ranks=4, experts=10, topk=4, hidden=48, tokens=[9, 0, 17, 4], device="cuda:0")
PAIR = Case(ranks=2, experts=6, topk=2, hidden=16, tokens=[30], device="cuda:0")


def on_gpu(**shape: Any) -> Case:
    return Case(device="cuda:0", **shape)


def test_a_rank_that_does_not_come_is_named(opened: Any) -> None:
    """The kernel ends by itself; whoever waits for the one that gave up hears the name of the third."""
    case = on_gpu(ranks=3, experts=6, topk=2, hidden=16, tokens=[5], more={"timeout": 0.5})
    groups = opened(case)
    steps = [dispatch(case, group, 0) for group in groups[:2]]
    groups[0].dispatch_recv(steps[0]).contiguous()
    groups[1].dispatch_recv(steps[1]).contiguous()
    torch.cuda.synchronize()
    for group in groups[:2]:
        with pytest.raises(RankLost, match="nothing came from rank 2") as error:
            group.check()
        assert error.value.ranks == (2,)
        with pytest.raises(RankLost):  # and no further step
            dispatch(case, group, 1)


def test_a_rank_that_gave_up_says_because_of_whom(opened: Any) -> None:
    """Rank 0 waits for rank 2 in vain. Rank 1, which came later and waits for nobody but rank 0, hears of rank 2."""
    case = on_gpu(ranks=3, experts=6, topk=2, hidden=16, tokens=[5], more={"timeout": 0.5})
    groups = opened(case)
    first = dispatch(case, groups[0], 0)
    groups[0].dispatch_recv(first).contiguous()
    torch.cuda.synchronize()
    later = dispatch(case, groups[1], 0)
    groups[1].dispatch_recv(later).contiguous()
    torch.cuda.synchronize()
    with pytest.raises(RankLost) as error:
        groups[0].check()
    assert error.value.ranks == (1, 2)
    with pytest.raises(RankLost) as error:
        groups[1].check()
    assert 2 in error.value.ranks


def test_wrong_ids_are_named_and_cost_one_step(opened: Any) -> None:
    groups = opened(PAIR)
    x = torch.ones((3, 16), dtype=torch.bfloat16, device="cuda:0")
    ids = torch.tensor([[0, 1], [2, 6], [3, -1]], device="cuda:0")
    steps = [group.dispatch_send(x, ids) for group in groups]
    for group, step in zip(groups, steps, strict=True):
        torch.cuda.synchronize()
        with pytest.raises(BadRange, match="token 1 named expert 6: experts go from 0 to 5"):
            group.check()
        view = group.dispatch_recv(step).contiguous()
        group.combine_send(view, torch.ones((view.rows, 16), dtype=torch.bfloat16, device="cuda:0"))
    for group, step in zip(groups, steps, strict=True):
        assert group.combine_recv(step)[1].eq(1).all()
    assert run_steps(PAIR, groups, 2) == 4


def test_a_view_that_is_too_small_is_an_error_on_all_ranks(opened: Any) -> None:
    case = Case(**{**PAIR.__dict__, "more": {"timeout": 0.5}})
    groups = opened(case)
    steps = [dispatch(case, group, 0) for group in groups]
    groups[0].dispatch_recv(steps[0]).contiguous(capacity=3)
    view = groups[1].dispatch_recv(steps[1]).contiguous()
    groups[1].combine_send(view, compute(case, view))
    groups[1].combine_recv(steps[1])
    torch.cuda.synchronize()
    with pytest.raises(BadRange, match="capacity is 3"):
        groups[0].check()
    with pytest.raises(RankLost) as error:
        groups[1].check()
    assert error.value.ranks == (0,)


def test_wrong_arguments(opened: Any) -> None:
    group = opened(PAIR)[0]
    x = torch.ones((3, 16), dtype=torch.bfloat16, device="cuda:0")
    ids = torch.zeros((3, 2), dtype=torch.int64, device="cuda:0")
    for wrong, words in [
        ((x.cpu(), ids), "x is on cpu: this group was opened for cuda:0"),
        ((x, ids.cpu()), "topk_ids is on cpu"),
        ((x[:, :8], ids), "rows of 32 bytes are configured, these have 16"),
        ((x[:2], ids), "x has 2 rows, topk_ids has 3 tokens"),
        ((x, ids.float()), "int64 or int32"),
        ((x, ids[:, :1].repeat(1, 3)), "3 experts a token, topk is 2"),
        ((x, ids, ids[:2]), "topk_weights has shape"),
    ]:
        with pytest.raises(BadRange, match=words):
            group.dispatch_send(*wrong)
    with pytest.raises(BadRange, match="31 tokens in one step, max_tokens is 30"):
        group.dispatch_send(x, ids[:1].repeat(31, 1))
    with pytest.raises(BadRange, match="live=4"):
        group.dispatch_send(x, ids, live=4)
    step = group.dispatch_send(x, ids)
    with pytest.raises(StepError, match="combine_recv"):
        group.combine_recv(step)
    view = group.dispatch_recv(step)
    with pytest.raises(BadRange, match="capacity=-1"):
        view.masked(-1)
    with pytest.raises(BadRange, match=r"alignment=2147483648: .* lower it"):
        view.contiguous(alignment=1 << 31, capacity=9)


def test_discarded_steps_are_heard_of(opened: Any) -> None:
    groups = opened(PAIR)
    steps = [dispatch(PAIR, group, 0) for group in groups]
    groups[0].discard(groups[0].dispatch_recv(steps[0]).step)
    view = view_of(PAIR, groups[1].dispatch_recv(steps[1]))
    groups[1].combine_send(view, compute(PAIR, view))
    for group, step in zip(groups, steps, strict=True):
        group.combine_recv(step)
        torch.cuda.synchronize()
        with pytest.raises(StepError, match=r"ranks \[0\] discarded"):
            group.check()
    assert run_steps(PAIR, groups, 2) == 4


def test_masked_ranks_are_left_out_and_counted(opened: Any) -> None:
    groups = opened(ROUTED)
    assert run_steps(ROUTED, groups, 2) == 8
    for group in groups[:3]:
        group.regroup_begin([0, 1, 2])
    for group in groups[:3]:
        group.regroup_end()
    assert run_steps(ROUTED, groups[:3], 3, first=2, masked=[3]) == 9
    assert sum(group.unreachable() for group in groups[:3]) > 0


def test_memory_is_what_the_formula_says(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the driver, that is: others may use this GPU, so that its free memory says nothing."""
    taken: list[int] = []
    allocate = Device.allocate

    def counted(self: Device, nbytes: int) -> int:
        taken.append(nbytes)
        return allocate(self, nbytes)

    monkeypatch.setattr(Device, "allocate", counted)
    case = on_gpu(ranks=2, experts=8, topk=2, hidden=4096, tokens=[512])
    groups = opened(case)
    assert sum(taken) == sum(group.gpu.layout.memory()["total"] for group in groups)
    torch.cuda.synchronize()


def test_groups_come_and_go(opened: Any) -> None:
    """A hundred times, and what is free afterwards is what was free before, as far as other users of the GPU tell."""
    case = on_gpu(ranks=2, experts=8, topk=2, hidden=4096, tokens=[512])
    each = GpuLayout.of(case.config).memory()["total"] * 2
    opened(case)
    opened.close()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(100):
        opened(case)
        opened.close()
    assert before - torch.cuda.mem_get_info()[0] < 50 * each


def test_shapes_that_kernels_do_not_take(opened: Any) -> None:
    with pytest.raises(ConfigError, match="float64"):
        opened(on_gpu(ranks=2, out_dtype="float64", dtype="float64"))
