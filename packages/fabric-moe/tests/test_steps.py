"""Whole steps, ranks of one thread, deliveries reordered on purpose: every bit as the reference has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_cases import ROUTINGS, VIEWS, Case, dispatch, run_steps


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing(opened: Any, routing: str) -> None:
    case = Case(
        ranks=4, experts=10, topk=4, hidden=48, tokens=[9, 0, 17, 4], routing=routing, more={"private_tokens": 2}
    )
    assert run_steps(case, opened(case), 3) == 12


@pytest.mark.parametrize(
    ("dtype", "scale_bytes"),
    [
        ("bfloat16", 0), ("float16", 0), ("float32", 0), ("float8_e4m3fn", 4), ("float8_e5m2", 1), ("int8", 3),
        ("float4_e2m1", 8), ("uint8", 0), ("float64", 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("view", VIEWS)
def test_every_type_in_every_view(opened: Any, dtype: str, scale_bytes: int, view: str) -> None:
    out = "float64" if dtype == "float64" else "bfloat16"
    case = Case(
        ranks=3, experts=7, topk=3, hidden=34, tokens=[6, 11, 1], dtype=dtype, scale_bytes=scale_bytes, out_dtype=out,
        view=view, alignment=4, routing="minus-random",
    )  # fmt: skip
    assert run_steps(case, opened(case), 2) == 6


# Between two bfloat16 roundings the order of a sum is hardly ever visible; in float32 it is.
@pytest.mark.parametrize(
    ("out", "wire"),
    [("bfloat16", "float32"), ("float16", "float16"), ("float32", "bfloat16"), ("float32", "float32")],
)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("accumulate", [True, False])
def test_sums(opened: Any, out: str, wire: str, weighted: bool, accumulate: bool) -> None:
    case = Case(
        ranks=4, experts=4, topk=4, hidden=40, tokens=[12], out_dtype=out, wire_dtype=wire, weighted=weighted,
        accumulate=accumulate,
    )  # fmt: skip
    assert run_steps(case, opened(case), 2) == 8


@pytest.mark.parametrize("hidden", [16, 64, 2048, 2880, 3584, 4096, 5120, 7168, 7680, 8192, 16384])
def test_hidden_sizes(opened: Any, hidden: int) -> None:
    case = Case(ranks=2, experts=5, topk=2, hidden=hidden, tokens=[3, 2])
    assert run_steps(case, opened(case), 1) == 2


@pytest.mark.parametrize(
    ("topk", "experts"), [(1, 2), (2, 2), (6, 64), (8, 256), (10, 512), (16, 896), (22, 128), (32, 160)]
)
def test_topk_and_experts(opened: Any, topk: int, experts: int) -> None:
    case = Case(ranks=3, experts=experts, topk=topk, hidden=16, tokens=[4, 5, 6], alignment=16)
    assert run_steps(case, opened(case), 1) == 3


def test_more_sums_than_are_staged_at_a_time(opened: Any) -> None:
    """All tokens of five ranks go to one, whose sums leave in several loads of its staging memory."""
    case = Case(ranks=5, experts=5, topk=1, hidden=20, tokens=[9, 6, 9, 8, 9], routing="one-expert")
    assert case.config.stage_rows == 9
    assert run_steps(case, opened(case), 3) == 15


@pytest.mark.parametrize("alignment", [1, 8, 16, 64, 128])
def test_alignment(opened: Any, alignment: int) -> None:
    case = Case(ranks=2, experts=6, topk=2, hidden=16, tokens=[30], alignment=alignment)
    groups = opened(case)
    assert run_steps(case, groups, 2) == 4
    steps = [dispatch(case, group, 2) for group in groups]
    for group, step in zip(groups, steps, strict=True):
        received = group.dispatch_recv(step)
        view = received.contiguous(alignment)
        assert not (view.offsets % alignment).any()
        assert (np.diff(view.offsets) - view.counts < alignment).all()
        assert view.counts.sum() == (received.local_ids >= 0).sum()


@pytest.mark.parametrize(("start", "most"), [(0, 0), (0, 64), (1, 1), (32, 128)])
@pytest.mark.parametrize("shared", [1, 7, None])
def test_private_rows_and_turns_of_shared_memory(opened: Any, start: int, most: int, shared: int | None) -> None:
    """Shared memory of one row means as many turns as rows; the result is the same."""
    more = {"private_tokens": start, "private_max": most, "shared_rows": shared}
    case = Case(ranks=4, experts=8, topk=2, hidden=24, tokens=[20, 3, 0, 31], routing="zipf", more=more)
    assert run_steps(case, opened(case), 4) == 16


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape(opened: Any, data: st.DataObject) -> None:
    draw = data.draw
    private_max = draw(st.integers(0, 12), "private_max")
    case = Case(
        ranks=draw(st.integers(1, 6), "ranks"),
        experts=draw(st.integers(1, 20), "experts"),
        topk=draw(st.integers(1, 9), "topk"),
        hidden=draw(st.integers(1, 70), "hidden"),
        tokens=draw(st.lists(st.integers(0, 24), min_size=1, max_size=6), "tokens"),
        dtype=draw(st.sampled_from(["bfloat16", "float32", "float8_e4m3fn", "int8"]), "dtype"),
        scale_bytes=draw(st.integers(0, 5), "scale_bytes"),
        out_dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"]), "out"),
        wire_dtype=draw(st.sampled_from([None, "bfloat16", "float32"]), "wire"),
        routing=draw(st.sampled_from(ROUTINGS), "routing"),
        view=draw(st.sampled_from(VIEWS), "view"),
        alignment=draw(st.integers(1, 9), "alignment"),
        weighted=draw(st.booleans(), "weighted"),
        accumulate=draw(st.booleans(), "accumulate"),
        seed=draw(st.integers(0, 1 << 20), "seed"),
        more={
            "private_max": private_max,
            "private_tokens": draw(st.integers(0, private_max), "private_tokens"),
            "shared_rows": draw(st.none() | st.integers(1, 40), "shared_rows"),
            "depth": draw(st.integers(1, 3), "depth"),
        },
    )
    run_steps(case, opened(case), 2)
    opened.close()
