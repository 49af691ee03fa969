"""Ranks on a GPU that reach each other through the engine, as a process of its own: see rank_process.py.

`words`: "stand-in" where no GPU is used; then generation and members, for ranks that come back.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import nic_standin
import torch
from moe_inputs import Case
from rank_process import numbers, obey_all

from fabric_core import TransferEngine
from fabric_core.bootstrap import open_board
from fabric_moe import MoeGroup
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
        obey_all(case, groups, pipe)
