"""Many ranks in one process, on the `sim` backend, which delivers in every possible order."""

from __future__ import annotations

import os

import pytest
from moe_cases import Case, run_steps

from fabric_core import TransferEngine
from fabric_moe import MoeGroup, Table

MANY = int(os.environ.get("FABRIC_MOE_RANKS", "64"))


@pytest.mark.parametrize("seed", [1, 2])
def test_64_ranks_on_8_engines(seed: int) -> None:
    """8 engines of 8 ranks, as 8 nodes would be: every rank writes to every other one, results bit for bit."""
    case = Case(
        ranks=MANY, experts=MANY * 2 + 5, topk=6, hidden=16, tokens=[2, 0, 3, 1], routing="minus-random", seed=seed,
        more={"private_tokens": 1, "private_max": 1, "shared_rows": 3, "timeout": 60.0},
    )  # fmt: skip
    engines = [TransferEngine.open(backend="sim", sim_seed=seed * 100 + i) for i in range(8)]
    try:
        groups = MoeGroup.open_many(engines, case.config, range(MANY), Table())
        assert run_steps(case, groups, 2) == 2 * MANY
        for group in groups:
            group.close()
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize(("backend", "nics"), [("sim", 2), ("local", 2), ("local", 4)])
def test_nics(backend: str, nics: int) -> None:
    """Rows and sums above the size from which the engine cuts a write for all NICs; an engine for each rank."""
    case = Case(
        ranks=3, experts=6, topk=3, hidden=3000, tokens=[14, 9, 3], more={"private_tokens": 4, "private_max": 4}
    )
    if backend == "local":
        engines = [TransferEngine.open(nics=nics, local_shuffle=i) for i in range(3)]
    else:
        engines = [TransferEngine.open(backend=backend, nics=nics, sim_seed=i) for i in range(3)]
    try:
        groups = MoeGroup.open_many(engines, case.config, range(3), Table())
        assert run_steps(case, groups, 3) == 9
        for group in groups:
            group.close()
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("faults", ["delay=5ms", "reorder,delay=1ms"])
def test_late_and_reordered_immediates(faults: str) -> None:
    case = Case(ranks=4, experts=9, topk=3, hidden=24, tokens=[7, 2], more={"private_tokens": 1, "shared_rows": 4})
    engines = [TransferEngine.open(faults=f"{faults},seed={i}") for i in range(2)]
    try:
        groups = MoeGroup.open_many(engines, case.config, range(4), Table())
        assert run_steps(case, groups, 3) == 12
        for group in groups:
            group.close()
    finally:
        for engine in engines:
            engine.close()


def test_a_write_that_fails_breaks_the_group_and_not_the_process() -> None:
    """An injected error of the NIC ends the step with an error on some rank, at once; regrouping mends it."""
    from fabric_core import FabricError

    case = Case(ranks=2, experts=4, topk=2, hidden=24, tokens=[5], more={"timeout": 1.0})
    engines = [TransferEngine.open(), TransferEngine.open(faults="fail=1.0:EIO")]
    try:
        groups = MoeGroup.open_many(engines, case.config, range(2), Table())
        with pytest.raises(FabricError):
            run_steps(case, groups, 1)
        assert any(group.broken is not None for group in groups)
        for group in groups:
            group.close()
    finally:
        for engine in engines:
            engine.close()
