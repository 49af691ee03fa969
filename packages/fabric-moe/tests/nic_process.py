"""Ranks on a GPU that reach each other through the engine, as a process of its own: see rank_process.py.

`words`: "stand-in" where no GPU is used; then generation and members, for ranks that come back.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import nic_standin
import torch
from moe_inputs import Case
from rank_process import numbers, obey

from fabric_core import FabricError, TransferEngine
from fabric_core.bootstrap import open_board
from fabric_moe import MoeGroup, RankLost
from fabric_moe.gpu_nic.generation import NicGeneration


def serve(text: str, ranks: list[int], board: str, job: str, words: list[str], pipe: Connection) -> None:
    """Open groups for `ranks` and obey."""
    torch.set_num_threads(1)
    case, place = Case.read(text), open_board(board)
    standin = "stand-in" in words
    if standin:
        nic_standin.install(setattr)
    words = [word for word in words if word != "stand-in"]
    with TransferEngine.open("cpu" if standin else "cuda:0", heartbeat=2.5) as engine:
        if words:
            groups = [
                MoeGroup.open(
                    engine, case.config, rank, place, job=job, generation=int(words[0]), members=numbers(words[1]),
                    device="cuda:0", through="engine",
                )
                for rank in ranks
            ]  # fmt: skip
        else:
            groups = MoeGroup.open_many([engine], case.config, ranks, place, job=job, device="cuda:0", through="engine")
        assert all(isinstance(group.generation, NicGeneration) for group in groups)
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
