"""Ranks of a group as a process of its own, which obeys commands that come by a pipe and answers each with a line.

    steps FIRST COUNT [MASKED,...]    run and compare with the reference: "ok COMPARED"
    half NUMBER PART                  run the first PART (1 to 3) halves of a step, then say "half" and wait
    mask RANKS                        go on without them: "masked"
    regroup RANKS                     start afresh with them: "masked"
    end                               leave in good order: "bye"

A rank that is lost is answered by "lost RANKS SECONDS TEXT", any other error by "error TEXT".
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch
from moe_cases import Case, compute, dispatch, run_steps, settle, view_of

from fabric_core import FabricError, TransferEngine
from fabric_core.bootstrap import open_board
from fabric_moe import MoeGroup, RankLost


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def half(case: Case, groups: list[MoeGroup], number: int, part: int) -> None:
    under_way = [dispatch(case, group, number) for group in groups]
    if part >= 2:
        received = [group.dispatch_recv(step) for group, step in zip(groups, under_way, strict=True)]
        if part >= 3:
            for group, got in zip(groups, received, strict=True):
                view = view_of(case, got)
                settle(case, group)
                group.combine_send(view, compute(case, view), weighted=case.weighted)


def obey(case: Case, groups: list[MoeGroup], words: list[str]) -> str:
    match words:
        case ["steps", first, count, *rest]:
            return f"ok {run_steps(case, groups, int(count), int(first), numbers(rest[0]) if rest else [])}"
        case ["half", number, part]:
            half(case, groups, int(number), int(part))
            return "half"
        case ["mask", ranks]:
            gone = set(numbers(ranks))
            for group in groups:
                group.regroup_begin([rank for rank in group.members if rank not in gone])
            for group in groups:
                group.regroup_end()
            return "masked"
        case ["regroup", ranks]:
            for group in groups:
                group.regroup_begin(numbers(ranks))
            for group in groups:
                group.regroup_end()
            return "masked"
    raise ValueError(f"no command: {words}")


def obey_all(case: Case, groups: list[MoeGroup], pipe: Connection) -> None:
    """Do what the pipe says until it says end."""
    pipe.send("open")
    while (line := pipe.recv()) != "end":
        began = time.monotonic()
        try:
            pipe.send(obey(case, groups, line.split()))
        except RankLost as error:
            pipe.send(f"lost {','.join(map(str, error.ranks))} {time.monotonic() - began:.2f} {error}")
        except (FabricError, AssertionError) as error:
            pipe.send(f"error {type(error).__name__}: {error}")
    for group in groups:
        group.close()
    pipe.send("bye")


def serve(text: str, ranks: list[int], board: str, job: str, words: list[str], pipe: Connection) -> None:
    """Open groups for `ranks` and obey. `words`: generation and members, for ranks that come back."""
    torch.set_num_threads(1)
    case = Case.read(text)
    config, place = case.config, open_board(board)
    with TransferEngine.open(heartbeat=2.5) as engine:  # patient: other tests may keep the CPUs busy
        if words:
            generation, members = int(words[0]), numbers(words[1])
            groups = [
                MoeGroup.open(
                    engine, config, rank, place, job=job, generation=generation, members=members, device=case.device
                )
                for rank in ranks
            ]
        else:
            groups = MoeGroup.open_many([engine], config, ranks, place, job=job, device=case.device)
        obey_all(case, groups, pipe)
