"""Ranks that die, stand still, or are slow: the others name them in time, and go on without them."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest
from moe_cases import Case
from moe_told import all_say, start

SOON = 45.0  # seconds: before CASE's timeout, so it was the engine that noticed; usually 0.1 and 5
CASE = Case(
    ranks=4, experts=10, topk=3, hidden=64, tokens=[13, 5, 9, 1], routing="minus-random",
    more={"private_tokens": 2, "shared_rows": 8, "timeout": 60.0},
)  # fmt: skip
STEPS = int(os.environ.get("FABRIC_MOE_STEPS", "60"))  #: of each part of the long run
LONG = 60.0 + STEPS  # seconds that a part of it may take


def lost(answers: list[str], rank: int, within: float = SOON) -> None:
    """Each named that rank and no other, in time."""
    for answer in answers:
        _, named, seconds, _ = answer.split(maxsplit=3)
        assert named == str(rank), answer
        assert float(seconds) < within, answer


@pytest.mark.parametrize("part", [0, 1, 2, 3])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_gone_and_the_others_go_on(processes: Any, how: signal.Signals, part: int) -> None:
    """Before its dispatch, between send and receive, before its combine, and before it receives the sums."""
    started = start(processes, CASE)
    all_say(started, "steps 0 2", "ok 2")
    victim, others = started[2], [started[0], started[1], started[3]]
    if part:
        # all send, so that the victim's part of the step is there as far as it got
        for process in others:
            process.tell("half 2 1")
        victim.tell(f"half 2 {part}")
        for process in others:
            process.hear("half")
        victim.hear("half")
    os.kill(victim.pid, how)
    if part:  # steps 3 and on need what the victim still owes to step 2; there are two slots
        lost(all_say(others, "steps 3 3", "lost"), 2)
    else:
        lost(all_say(others, "steps 2 1", "lost"), 2)
    all_say(others, "mask 2", "masked")
    all_say(others, "steps 5 4 2", "ok 4")
    if how == signal.SIGSTOP:  # it wakes up and writes on, for a generation that is over
        os.kill(victim.pid, signal.SIGCONT)
        if not part:
            victim.tell("steps 2 1")
            victim.hear("lost")
        all_say(others, "steps 9 4 2", "ok 4")
    for process in others:
        process.end()


def test_a_slow_rank_is_named_and_taken_back(processes: Any) -> None:
    case = Case(**{**vars(CASE), "more": {**CASE.more, "timeout": 3.0}})
    started = start(processes, case)
    started[1].tell("half 0 2")  # and no combine
    for process in (started[0], started[2], started[3]):
        process.tell("steps 0 1")
    started[1].hear("half")
    lost([started[i].hear("lost") for i in (0, 2, 3)], 1)
    started[1].tell("steps 1 1")  # it hears why the others gave up
    assert "(this rank)" in started[1].hear("lost 1")
    all_say(started, "regroup 0,1,2,3", "masked")
    all_say(started, "steps 2 5", "ok 5")


def test_a_rank_comes_back(processes: Any) -> None:
    started = start(processes, CASE)
    os.kill(started[3].pid, signal.SIGKILL)
    lost(all_say(started[:3], "steps 0 1", "lost"), 3)
    all_say(started[:3], "mask 3", "masked")
    all_say(started[:3], "steps 1 2 3", "ok 2")
    again = processes(CASE, [3], "2", "0,1,2,3")
    all_say(started[:3], "regroup 0,1,2,3", "masked")
    again.hear("open")
    all_say([*started[:3], again], "steps 3 5", "ok 5")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_of_a_node_is_gone(processes: Any, how: signal.Signals) -> None:
    """Whoever hears of it leaves at once, with its engine; those that it leaves waiting still name the first one."""
    started = [processes.node(CASE, rank, 2) for rank in range(4)]
    for word in ("open", "going"):
        for process in started:
            process.hear(word)
    os.kill(started[3].pid, how)
    for process in started[:3]:
        assert process.hear("lost").split()[1] == "3"


def test_many_steps_with_stalls_and_a_kill(processes: Any) -> None:
    """Random routing, ranks that are stopped for a moment all the time, and one that is killed in the middle."""
    dice = random.Random(7)
    started = start(processes, CASE)
    for process in started:
        process.tell(f"steps 0 {STEPS}")
    waiting = {0, 1, 2, 3}
    while waiting:
        process = started[dice.choice(sorted(waiting))]
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(dice.uniform(0.001, 0.05))  # how long it stands still: below the heartbeat
        os.kill(process.pid, signal.SIGCONT)
        waiting = {i for i in waiting if not started[i]._pipe.poll(0.01)}
    for process in started:
        process.hear(f"ok {STEPS}")
    for process in started:
        process.tell(f"steps {STEPS} {STEPS}")
    time.sleep(0.05)  # anywhere in the run is fine
    os.kill(started[1].pid, signal.SIGKILL)
    others = [started[0], *started[2:]]
    lost([process.hear("lost", LONG) for process in others], 1, within=1e9)  # the time includes the good steps
    all_say(others, "mask 1", "masked")
    all_say(others, f"steps {STEPS} {STEPS} 1", f"ok {STEPS}", LONG)
