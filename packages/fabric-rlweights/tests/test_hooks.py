"""An engine's hooks that fail: the rank is named, serves nothing, and the next update puts it right."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import numpy as np
import pytest
from oracle import place, plain, random_bits, shard

from fabric_core import TransferEngine
from fabric_rlweights.controller import Controller
from fabric_rlweights.hooks import Hooks
from fabric_rlweights.meta import EngineTable, TrainerTable
from fabric_rlweights.receiver import Receiver
from fabric_rlweights.trainer import Trainer


class Failing(Hooks):
    """Raises in one hook, for one version."""

    def __init__(self, where: str, at: int) -> None:
        self.where, self.at, self.calls = where, at, [""]

    def _step(self, where: str, version: int) -> None:
        self.calls.append(f"{where} {version}")
        if (where, version) == (self.where, self.at):
            raise RuntimeError(f"no {where} today")

    def pause(self, version: int) -> None:
        self._step("pause", version)

    def reset_caches(self, version: int) -> None:
        self._step("reset", version)

    def resume(self, version: int) -> None:
        self._step("resume", version)


@pytest.mark.parametrize("double", [False, True], ids=["in place", "double buffer"])
@pytest.mark.parametrize("where", ["pause", "reset", "resume"])
def test_a_hook_that_raises(where: str, double: bool) -> None:
    bits = random_bits(np.random.default_rng(1), (8, 16), "bfloat16")
    buffers: list[np.ndarray] = []
    table = TrainerTable(rank=0, shards=(shard("w", "bfloat16", bits, (0, 0), (8, 16), buffers),))
    tensor, entry = plain("w", (8, 16), "bfloat16"), place("w", "w", (0, 0), (8, 16), (0, 0))
    memory = np.zeros((8, 16), np.uint16)
    hooks = Failing(where, 2)
    with (
        TransferEngine.open() as engine,
        TransferEngine.open() as ours,
        TransferEngine.open() as theirs,
        Controller(engine, trainers=1, receivers=1) as controller,
        Trainer(ours, table, buffers, controller=engine.address) as trainer,
        Receiver(
            theirs, EngineTable(rank=0, tensors=(tensor,), entries=(entry,)), {"w": memory}, controller=engine.address,
            hooks=hooks, double_buffer=double,
        ) as receiver,
    ):  # fmt: skip
        controller.wait_ready(60)
        for version in (1, 2, 3):
            buffers[0][:] = version
            outcome = trainer.push(version, timeout=60)
            # before a pause that fails nothing was written in place; later failures are of one rank alone
            assert outcome.committed == (version != 2 or where != "pause" or double), outcome
            assert outcome.culprits == (("receiver 0",) if version == 2 else ()), outcome
            assert (f"no {where} today" in outcome.reason) == (version == 2), outcome
            if version != 2:
                assert receiver.serving
                assert (receiver.tensors["w"] == version).all()
            elif outcome.committed:  # the others serve it, this rank does not
                assert not receiver.serving
                assert ("resume 2" in hooks.calls) == (where == "resume")
