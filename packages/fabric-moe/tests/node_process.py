"""A rank of a `NodeGroup` as a process of its own: steps without end, and what ends them as a line."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch
from moe_cases import Case, given

from fabric_core import FabricError, TransferEngine
from fabric_core.bootstrap import open_board
from fabric_moe import NodeGroup, RankLost


def step(case: Case, group: NodeGroup, number: int) -> None:
    mine = given(case, group.rank, number)
    under_way = group.dispatch_send(mine.x, mine.ids, mine.weights)
    group.dispatch_forward(under_way)
    view = group.dispatch_recv(under_way).compact()
    group.combine_send(view, view.tensor())
    group.combine_forward(under_way)
    group.combine_recv(under_way)


def serve(text: str, ranks: list[int], board: str, job: str, words: list[str], pipe: Connection) -> None:
    """Say "open", and "going" after five steps; then "lost RANKS" or "error TEXT", and leave at once. words: [node]."""
    torch.set_num_threads(1)
    case = Case.read(text)
    line = ""
    with (
        TransferEngine.open(heartbeat=2.5) as engine,
        NodeGroup.open(engine, case.config, ranks[0], open_board(board), node=int(words[0]), job=job) as group,
    ):
        pipe.send("open")
        try:
            for number in range(1 << 30):
                step(case, group, number)
                if number == 5:
                    pipe.send("going")
        except RankLost as error:
            line = f"lost {','.join(map(str, error.ranks))} {error}"
        except FabricError as error:
            line = f"error {type(error).__name__}: {error}"
    pipe.send(line)
