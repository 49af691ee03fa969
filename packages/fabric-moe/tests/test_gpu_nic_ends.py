"""How ranks end whose tokens travel through the engine: dropped, interrupted, with a GPU or an engine that is gone."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nic_standin
import nic_words
import pytest
from moe_cases import Case, dispatch, view_of

from fabric_core import BackendError, EngineClosed, QueueFull, StaleHandle, TransferEngine
from fabric_moe import MoeGroup, RankLost, StepError, Table, kernels
from fabric_moe.gpu_nic import generation

pytestmark = pytest.mark.skipif(kernels.NATIVE is None, reason="fabric-moe was built without its C part")

CASE = Case(ranks=4, experts=10, topk=4, hidden=24, tokens=[5], more={"timeout": 60.0})
THREAD = "fabric-moe-gpu"

#: A program that closes nothing. Of hooks at exit the last one runs first: this one runs after those of the library.
UNCLOSED = """
import atexit

def last():
    ends.until(lambda: not ends.running(), 20.0)
    print(ends.running())

atexit.register(last)
import test_gpu_nic_ends as ends

ends.nic_standin.install(setattr)
engine = ends.TransferEngine.open()
groups = ends.opened(engine)
ends.dispatch(ends.CASE, groups[0], 0)
print(ends.until(ends.running))
"""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> nic_standin.StandIn:
    return nic_standin.install(monkeypatch.setattr)


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine.open() as engine:
        yield engine


def opened(engine: TransferEngine, case: Case = CASE) -> list[MoeGroup]:
    return MoeGroup.open_many([engine], case.config, range(case.ranks), Table(), device="cuda:0", through="engine")


def until(true: Callable[[], bool], seconds: float = 50.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.001)
    return true()


def running() -> bool:
    """Whether the thread is there that looks at the words of ranks: it ends with the last of them."""
    found = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            found.append(path.read_text().strip())
    return THREAD in found


def mail(group: MoeGroup) -> nic_words.Mail:
    return nic_words.Mail.from_address(group.generation._memory.mail)


def immediates(group: MoeGroup) -> list[int]:
    return [imm for row in group.generation._imms for imm in row]


def in_use(engine: TransferEngine, imm: int) -> bool:
    try:
        engine.imm_count(imm)
    except StaleHandle:
        return False
    return True


def test_a_group_that_nobody_closes_ends_with_its_last_reference(device: Any, engine: TransferEngine) -> None:
    groups = opened(engine)
    step = dispatch(CASE, groups[0], 0)
    assert until(running)
    del groups, step
    gc.collect()
    assert until(lambda: not running())


def test_a_program_may_end_without_closing_anything() -> None:
    """The thread in C has ended before the engines are closed and their memory goes."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\nFalse\n"), done.stderr


def test_a_rank_whose_gpu_has_failed_still_tells_the_others(
    device: Any, engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its memory, which nobody knows the users of, and nothing else."""
    kept: list[Any] = []
    monkeypatch.setattr(generation, "_KEPT", kept)
    groups = opened(engine)
    dispatch(CASE, groups[0], 0)

    def fails() -> None:
        raise BackendError("cuCtxSynchronize: an illegal memory access was encountered (700)")

    with monkeypatch.context() as patch:
        patch.setattr(device, "synchronize", fails)
        groups[1].close()
    assert until(lambda: mail(groups[0]).gone == 1 << 1)
    assert not any(in_use(engine, imm) for imm in immediates(groups[1]))
    for group in groups:
        group.close()
    assert kept == [groups[1].generation._memory]
    assert device.held == 4


def test_a_close_that_was_interrupted_may_be_made_again(
    device: Any, engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = opened(engine, Case(**{**vars(CASE), "ranks": 1}))[0]

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(device, "synchronize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group.close()
    engine.free_imm(immediates(group)[0])  # one that is gone keeps none of the others
    group.close()
    assert not any(in_use(engine, imm) for imm in immediates(group))
    assert device.held == 0


def test_a_dispatch_that_was_interrupted_ends_the_group_and_is_named(
    device: Any, engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counts have left, its rows never come: the others hear of it at once."""
    case = Case(**{**vars(CASE), "more": {"timeout": 300.0}})
    groups = opened(engine, case)
    real = nic_standin.Launched.launch

    def launch(self: nic_standin.Launched, *arguments: Any) -> None:
        if self.name == "pack":
            raise KeyboardInterrupt
        real(self, *arguments)

    others = [group for group in groups if group is not groups[2]]
    steps = [dispatch(case, group, 0) for group in others]
    with monkeypatch.context() as patch:
        patch.setattr(nic_standin.Launched, "launch", launch)
        with pytest.raises(KeyboardInterrupt):
            dispatch(case, groups[2], 0)
    with pytest.raises(StepError, match="half-way"):
        dispatch(case, groups[2], 0)
    assert until(lambda: all(mail(group).gone for group in others))
    for group, step in zip(others, steps, strict=True):
        view_of(case, group.dispatch_recv(step))
        with pytest.raises(RankLost) as lost:
            group.check()
        assert lost.value.ranks == (2,)
    for group in groups:
        group.close()
    assert device.held == 0


def test_an_engine_that_is_closed_under_a_step_is_noticed(device: Any, engine: TransferEngine) -> None:
    groups = opened(engine)
    step = dispatch(CASE, groups[0], 0)
    assert until(lambda: mail(groups[0]).begun[step.slot] == 1)
    groups[0].generation.report.proxy.finish(0.0)  # the look that began the step is over: all is sent, and waited for
    engine.close()
    assert until(lambda: mail(groups[0]).noted == 1 << 0)  # by which a kernel ends that waits
    with pytest.raises(EngineClosed, match="the engine is closed"):
        groups[0].check()
    for group in groups:
        group.close()
    assert device.held == 0


def test_immediates_of_a_rank_that_cannot_open_are_given_back(device: Any) -> None:
    with TransferEngine.open(imm_slots=256) as engine:
        taken = []
        with contextlib.suppress(QueueFull):
            while True:
                taken.append(engine.alloc_imm())
        for imm in taken[:4]:
            engine.free_imm(imm)
        with pytest.raises(QueueFull):
            opened(engine, Case(**{**vars(CASE), "ranks": 1}))
        assert len({engine.alloc_imm() for _ in range(4)}) == 4
    assert device.held == 0
