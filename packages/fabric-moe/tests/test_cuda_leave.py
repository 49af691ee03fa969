"""Kernels on a GPU when ranks leave, epochs wrap, reports meet, and shapes are large."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from moe_cases import Case, compute, dispatch, run_steps, view_of

from fabric_core import BadRange
from fabric_moe import RankLost
from fabric_moe.cuda import blocks, memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or a torch without CUDA"),
]

TRIO = Case(ranks=3, experts=6, topk=2, hidden=16, tokens=[5], device="cuda:0", more={"timeout": 0.5})
PAIR = Case(ranks=2, experts=6, topk=2, hidden=16, tokens=[30], device="cuda:0")


def test_a_rank_that_leaves_in_the_middle_is_named(opened: Any) -> None:
    """Its memory stays until the others have left too: what they still write, and note, lands nowhere else."""
    groups = opened(TRIO)
    assert run_steps(TRIO, groups, 2) == 6
    steps = [dispatch(TRIO, group, 2) for group in groups[:2]]
    groups[2].close()
    assert len(memory._KEPT) == 1
    for group, step in zip(groups[:2], steps, strict=True):
        group.dispatch_recv(step).contiguous()
    torch.cuda.synchronize()
    for group in groups[:2]:
        with pytest.raises(RankLost) as error:
            group.check()
        assert error.value.ranks == (2,)
    for group in groups[:2]:
        group.close()
    assert memory._KEPT == []
    torch.cuda.synchronize()  # no kernel has met an illegal address


def test_masking_without_a_loss_gives_memory_back(opened: Any) -> None:
    """Three ranks go on as two and as three again, without an error before; late writes go where nobody reads."""
    groups = opened(TRIO)
    assert run_steps(TRIO, groups, 2) == 6
    for members in ([0, 1], [0, 1]):
        for group in groups[:2]:
            group.regroup_begin(members)
        for group in groups[:2]:
            group.regroup_end()
        assert run_steps(TRIO, groups[:2], 2, first=2, masked=[2]) == 4
    assert len(memory._KEPT) == 2  # of the first generation: rank 2 has not left it
    late = dispatch(TRIO, groups[2], 2)
    groups[2].dispatch_recv(late).contiguous()
    torch.cuda.synchronize()
    with pytest.raises(RankLost):
        groups[2].check()
    groups[2].close()
    assert memory._KEPT == []


@pytest.mark.parametrize("view", ["contiguous", "rank-major"])
def test_epochs_wrap(opened: Any, view: str) -> None:
    """Uses of a slot are counted in 32 bits, which lasts for days."""
    case = Case(**{**PAIR.__dict__, "view": view})
    groups = opened(case)
    for group in groups:
        word = ctypes.c_uint32((1 << 32) - 2)
        for slot in range(case.config.depth):
            group.gpu.device.put(group.gpu._memory.local + 4 * slot, bytes(word))
    assert run_steps(case, groups, 8) == 16


def test_a_wrong_id_and_a_lost_rank_in_one_step(opened: Any) -> None:
    """Reading the one does not erase the other."""
    groups = opened(TRIO)
    x = torch.ones((3, 16), dtype=torch.bfloat16, device="cuda:0")
    step = groups[0].dispatch_send(x, torch.tensor([[0, 77]] * 3, device="cuda:0"))
    torch.cuda.synchronize()
    with pytest.raises(BadRange, match=r"token [0-2] named expert 77"):
        groups[0].check()
    groups[0].check()  # said once
    groups[0].dispatch_recv(step).contiguous()
    torch.cuda.synchronize()
    for _ in range(2):
        with pytest.raises(RankLost) as error:
            groups[0].check()
        assert error.value.ranks == (1, 2)


def test_wrong_ids_are_told_again_and_again(opened: Any) -> None:
    groups = opened(PAIR)
    x = torch.ones((30, 16), dtype=torch.bfloat16, device="cuda:0")
    for turn in range(4):
        ids = torch.full((30, 2), -2 - turn, device="cuda:0")
        steps = [group.dispatch_send(x, ids) for group in groups]
        torch.cuda.synchronize()
        for group, step in zip(groups, steps, strict=True):
            with pytest.raises(BadRange, match=rf"token \d+ named expert {-2 - turn}:"):
                group.check()
            view = group.dispatch_recv(step).contiguous()
            group.combine_send(view, torch.ones((view.rows, 16), dtype=torch.bfloat16, device="cuda:0"))
        for group, step in zip(groups, steps, strict=True):
            group.combine_recv(step)
            torch.cuda.synchronize()
            group.check()


@pytest.mark.parametrize(
    "case",
    [
        Case(ranks=2, experts=300, topk=128, hidden=8, tokens=[500, 7], device="cuda:0", view="compact"),
        Case(ranks=1, experts=8192, topk=4, hidden=8, tokens=[64], device="cuda:0"),
        Case(ranks=2, experts=4, topk=1, hidden=1, tokens=[9], device="cuda:0", dtype="int8"),
        Case(ranks=2, experts=4, topk=9, hidden=7, tokens=[9], device="cuda:0", routing="twice", view="compact"),
    ],
    ids=lambda c: f"{c.ranks}x{c.experts}x{c.topk}x{c.hidden}x{c.tokens[0]}",
)
def test_shapes_at_the_limits(opened: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with so many tokens of a block that its shared memory would not do."""
    if case.topk == 128:
        monkeypatch.setattr(blocks, "each_of", lambda gen, tokens: 512)
    assert run_steps(case, opened(case), 1) == case.ranks


@pytest.mark.parametrize("tokens", [0, 3])
def test_scales_of_three_axes(opened: Any, tokens: int) -> None:
    case = Case(**{**PAIR.__dict__, "scale_bytes": 8})
    groups = opened(case)
    x = torch.ones((tokens, 16), dtype=torch.bfloat16, device="cuda:0")
    ids = torch.zeros((tokens, 2), dtype=torch.int64, device="cuda:0")
    scales = torch.arange(tokens * 8, dtype=torch.uint8, device="cuda:0").reshape(tokens, 2, 4)
    steps = [group.dispatch_send(x, ids, scales=scales) for group in groups]
    view = groups[0].dispatch_recv(steps[0]).compact()
    assert view.scales[: 2 * tokens].tolist() == scales.reshape(tokens, 8).tolist() * 2


def test_numbers_of_another_type_are_refused(opened: Any) -> None:
    groups = opened(PAIR)
    ids = torch.zeros((3, 2), dtype=torch.int64, device="cuda:0")
    with pytest.raises(BadRange, match="x is of float16: bfloat16 is wanted"):
        groups[0].dispatch_send(torch.ones((3, 16), dtype=torch.float16, device="cuda:0"), ids)
    steps = [dispatch(PAIR, group, 0) for group in groups]
    view = view_of(PAIR, groups[0].dispatch_recv(steps[0]))
    with pytest.raises(BadRange, match="y is of float16: bfloat16 is wanted"):
        groups[0].combine_send(view, compute(PAIR, view).half(), dtype="bfloat16")
    with pytest.raises(BadRange, match="y has shape"):
        groups[0].combine_send(view, torch.ones((view.rows, 15), dtype=torch.bfloat16, device="cuda:0"))
