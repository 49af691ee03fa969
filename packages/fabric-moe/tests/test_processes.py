"""Ranks in processes of their own."""

from __future__ import annotations

from typing import Any

import pytest
from moe_cases import Case


@pytest.mark.parametrize(("count", "each"), [(2, 1), (4, 1), (8, 1), (2, 3)])
def test_steps_between_processes(processes: Any, count: int, each: int) -> None:
    case = Case(
        ranks=count * each, experts=13, topk=4, hidden=256, tokens=[24, 7, 0, 1], dtype="float8_e4m3fn", scale_bytes=2,
        routing="minus-random", more={"private_tokens": 4, "shared_rows": 16},
    )  # fmt: skip
    ranks = [list(range(i * each, (i + 1) * each)) for i in range(count)]
    started = [processes(case, some) for some in ranks]
    for process in started:
        process.hear("open")
    for process in started:
        process.tell("steps 0 8")
    for process in started:
        process.hear(f"ok {8 * each}")
    for process in started:
        process.end()
