"""Processes that are a rank each, and do what they are told together."""

from __future__ import annotations

from typing import Any

from moe_cases import Case


def start(processes: Any, case: Case) -> list[Any]:
    """Start a process for each rank, and wait until all groups are open."""
    started = [processes(case, [rank]) for rank in range(case.ranks)]
    for process in started:
        process.hear("open")
    return started


def all_say(started: list[Any], command: str, answer: str, timeout: float = 100.0) -> list[str]:
    """Tell all, then wait until each has said what begins with `answer`; return what they said."""
    for process in started:
        process.tell(command)
    return [process.hear(answer, timeout) for process in started]
