"""Ranks on GPUs as processes that reach each other through the engine, on a stand-in for the GPU."""

from __future__ import annotations

import os
import signal
from typing import Any

import nic_process
import pytest
from moe_cases import Case
from moe_told import all_say

from fabric_moe import kernels

pytestmark = pytest.mark.skipif(kernels.NATIVE is None, reason="fabric-moe was built without its C part")


def started(processes: Any, case: Case) -> list[Any]:
    made = [processes(case, [rank], "stand-in", serve=nic_process.serve) for rank in range(case.ranks)]
    for process in made:
        process.hear("open")
    return made


def test_processes(processes: Any) -> None:
    case = Case(ranks=4, experts=9, topk=3, hidden=16, tokens=[7, 2, 0, 9], routing="zipf", more={"timeout": 60.0})
    ranks = started(processes, case)
    all_say(ranks, "steps 0 6", "ok 6")
    for rank in ranks:
        rank.end()


def test_a_process_is_killed_and_the_others_go_on(processes: Any) -> None:
    """The engine says that it is gone, long before the timeout, and a kernel finds that its part is missing."""
    case = Case(ranks=3, experts=9, topk=3, hidden=16, tokens=[7, 5, 9], more={"timeout": 300.0})
    ranks = started(processes, case)
    all_say(ranks, "steps 0 2", "ok 2")
    os.kill(ranks[2].pid, signal.SIGKILL)
    for rank in ranks[:2]:
        rank.tell("steps 2 1")
    for rank in ranks[:2]:
        rank.hear("lost 2 ")
    for rank in ranks[:2]:
        rank.tell("mask 2")
    for rank in ranks[:2]:
        rank.hear("masked")
    all_say(ranks[:2], "steps 3 4 2", "ok 4")
