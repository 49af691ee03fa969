"""Element types: what is of another one is refused by name, never read as if it were the group's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from moe_cases import Case, compute, dispatch, given, same, view_of, wanted

from fabric_core import BadRange
from fabric_moe import MoeGroup
from fabric_moe.dtypes import check_type, flat

CASE = Case(ranks=2, experts=4, topk=2, hidden=16, tokens=[5])


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("bfloat16", [torch.bfloat16, torch.uint8, torch.int16, np.uint16, np.uint8], [torch.float16, np.float16]),
        ("float16", [torch.float16, np.float16, np.uint16], [torch.bfloat16, torch.float32]),
        ("float32", [torch.float32, np.float32, np.int32], [torch.float64, torch.int64, np.bool_]),
        ("float8_e4m3fn", [torch.float8_e4m3fn, torch.uint8, np.int8], [torch.float8_e5m2, torch.bool]),
        ("int8", [torch.int8, torch.uint8, np.int8], [torch.float8_e4m3fn, np.int16]),
        ("float4_e2m1", [torch.uint8, np.uint8], [torch.float8_e5m2, torch.bfloat16]),
        ("uint8", [torch.uint8, torch.bfloat16, np.float64], []),
    ],
)
def test_numbers_must_be_of_the_type(name: str, good: list[Any], bad: list[Any]) -> None:
    def made(kind: Any) -> Any:
        return torch.zeros((1, 1), dtype=kind) if isinstance(kind, torch.dtype) else np.zeros((1, 1), kind)

    for kind in good:
        check_type(made(kind), name, "x")
    for kind in bad:
        with pytest.raises(BadRange, match=f"x is of .*: {name} is wanted"):
            check_type(made(kind), name, "x")


def test_what_is_of_another_type_is_refused_everywhere(opened: Any) -> None:
    groups = opened(CASE)
    mine = given(CASE, 0, 0)
    for wrong in (mine.x.half(), mine.x.half().numpy()):
        with pytest.raises(BadRange, match="x is of float16: bfloat16 is wanted"):
            groups[0].dispatch_send(wrong, mine.ids)
    steps = [dispatch(CASE, group, 0) for group in groups]
    views = [view_of(CASE, group.dispatch_recv(step)) for group, step in zip(groups, steps, strict=True)]
    y = [compute(CASE, view) for view in views]
    for wrong, words in [
        (y[0].to(torch.float8_e4m3fn), "y is of float8_e4m3fn: experts' results are"),
        (y[0].to(torch.int16), "y is of int16"),
        (None, "y is a NoneType"),
    ]:
        with pytest.raises(BadRange, match=words):
            groups[0].combine_send(views[0], wrong)
    with pytest.raises(BadRange, match="y is of float16: bfloat16 is wanted"):
        groups[0].combine_send(views[0], y[0].half(), dtype="bfloat16")
    groups[0].combine_send(views[0], y[0].float().numpy())  # an array is of its own type
    groups[1].combine_send(views[1], y[1].view(torch.int16).numpy())  # integers are the bits
    with pytest.raises(BadRange, match="out is of float16"):
        groups[0].combine_recv(steps[0], out=torch.zeros((5, 16), dtype=torch.float16))
    for group, step in zip(groups, steps, strict=True):
        assert same(group.combine_recv(step), wanted(CASE, group.rank, 0))


def one_step(groups: list[MoeGroup], **more: Any) -> list[torch.Tensor]:
    """A step whose experts return the tokens."""
    steps = [
        group.dispatch_send(given(CASE, group.rank, 0).x, given(CASE, group.rank, 0).ids, **more) for group in groups
    ]
    for group, step in zip(groups, steps, strict=True):
        view = group.dispatch_recv(step).contiguous()
        group.combine_send(view, view.tensor())
    return [group.combine_recv(step) for group, step in zip(groups, steps, strict=True)]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_float(opened: Any, kind: torch.dtype) -> None:
    """Routers make them in the model's type."""
    groups = opened(CASE)
    weights = torch.linspace(0, 1, 10).reshape(5, 2).to(kind)
    found = one_step(groups, topk_weights=weights)
    for a, b in zip(found, one_step(groups, topk_weights=weights.float()), strict=True):
        assert same(a, b)


def test_routing_that_is_elsewhere_is_refused(opened: Any) -> None:
    group, mine = opened(CASE)[0], given(CASE, 0, 0)
    with pytest.raises(BadRange, match="topk_ids is on meta"):
        group.dispatch_send(mine.x, mine.ids.to("meta"))
    with pytest.raises(BadRange, match="topk_weights is on meta"):
        group.dispatch_send(mine.x, mine.ids, mine.weights.to("meta"))
    for live in (2.5, "2", True, 6, -1, torch.tensor(2.5)):
        with pytest.raises(BadRange, match="live="):
            group.dispatch_send(mine.x, mine.ids, live=live)
    with pytest.raises(BadRange, match="x is a list"):
        group.dispatch_send(mine.x.tolist(), mine.ids)


def test_things_that_are_no_steps_and_no_views(opened: Any) -> None:
    from fabric_moe import StepError

    groups = opened(CASE)
    step = dispatch(CASE, groups[0], 0)
    for call in (lambda: groups[0].dispatch_recv(None), lambda: groups[0].combine_recv(7)):
        with pytest.raises(StepError, match="is no step"):
            call()
    with pytest.raises(StepError, match="a Step is no view"):
        groups[0].combine_send(step, None)


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_scales_of_three_axes_and_no_tokens(opened: Any, tokens: int, kind: str) -> None:
    case = Case(**{**vars(CASE), "scale_bytes": 8})
    groups = opened(case)
    x, ids = torch.ones((tokens, 16), dtype=torch.bfloat16), torch.zeros((tokens, 2), dtype=torch.int64)
    scales: Any = torch.arange(tokens * 8, dtype=torch.uint8).reshape(tokens, 2, 4)
    steps = [g.dispatch_send(x, ids, scales=scales.numpy() if kind == "numpy" else scales) for g in groups]
    view = groups[0].dispatch_recv(steps[0]).compact()
    assert view.scales.tolist() == scales.reshape(tokens, 8).tolist() * 2


def test_flat_keeps_the_first_axis() -> None:
    assert flat(np.zeros((0, 3, 4)), "x").shape == (0, 12)
    assert tuple(flat(torch.zeros((2, 3, 4)), "x").shape) == (2, 12)
