"""The proxy in C: alone against a small engine, under sanitizers; and as groups use it."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moe_between import between
from moe_cases import Case, compute, dispatch, finish, run_steps, same, view_of, wanted

from fabric_core import ProtocolError, TransferEngine, get_include
from fabric_moe import MoeGroup, Table, kernels
from fabric_moe.generation import COUNTS, CREDIT, ROWS
from fabric_moe.step import Step

HERE = Path(__file__).parent
SOURCES = Path(kernels.__file__).parent / "native"
#: few private rows, and shared memory that is filled several times
CASE = Case(
    ranks=4, experts=9, topk=3, hidden=24, tokens=[9, 4, 7, 0],
    more={"private_tokens": 1, "private_max": 1, "shared_rows": 3, "timeout": 60.0},
)  # fmt: skip
needs_c = pytest.mark.skipif(kernels.NATIVE is None, reason="fabric-moe was built without its C part")


@pytest.mark.parametrize(
    ("name", "sanitizer"),
    [
        ("proxy", "address,undefined"),
        ("proxy", "thread"),
        ("route", "address,undefined"),
        ("rings", "address,undefined"),
        ("rings", "thread"),
    ],
)
def test_the_c_part_alone_under_a_sanitizer(tmp_path: Path, name: str, sanitizer: str) -> None:
    """tests/c/test_NAME.c: ranks as threads, turns, an engine that is full now and then, errors; plans; who serves."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or not SOURCES.is_dir():
        pytest.skip("no C compiler, or no sources")
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-pthread"]
    flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{get_include()}", f"-I{SOURCES}"]
    files = [HERE / "c" / f"test_{name}.c", *SOURCES.glob("*.c")]
    if name == "rings":
        files.remove(SOURCES / "thread.c")  # which it includes
    built = subprocess.run(
        [compiler, *flags, *map(str, files), "-o", str(tmp_path / name)],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"no library for -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    for seed in ("1", "2"):
        done = subprocess.run([str(tmp_path / name), seed], capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_c
def test_the_rest_leaves_without_python(opened: Any) -> None:
    """No rank has come to receive, and no callback of Python's has run: the second phase is sent all the same."""
    case = Case(**{**vars(CASE), "more": {"private_tokens": 0, "private_max": 0, "timeout": 60.0}})
    groups = opened(case)
    threads: set[str] = set()
    sent = threading.Event()
    rows = [0]

    def seen(kind: int | None, ranks: list[int]) -> list[int]:
        if kind == ROWS:
            threads.add(threading.current_thread().name)
            rows[0] += len(ranks)
            sent.set()
        return ranks

    between(groups[0], seen)
    steps = [dispatch(case, group, 0) for group in groups]
    assert sent.wait(60)
    assert all(name.startswith("Dummy") or name == threading.current_thread().name for name in threads)
    for group, step in zip(groups, steps, strict=True):
        assert isinstance(step, Step)
        assert step.failed() is None
        view = view_of(case, group.dispatch_recv(step))
        group.combine_send(view, compute(case, view))
    for group, step in zip(groups, steps, strict=True):
        assert same(finish(case, group, step, 0), wanted(case, group.rank, 0))


@needs_c
def test_turns_are_sent_as_credit_comes(opened: Any) -> None:
    """A rank's late rows leave in several submits, each after a credit, and each row once."""
    groups = opened(CASE)
    calls: list[tuple[int | None, tuple[int, ...]]] = []

    def seen(kind: int | None, ranks: list[int]) -> list[int]:
        calls.append((kind, tuple(ranks)))
        return ranks

    between(groups[0], seen)
    assert run_steps(CASE, groups, 1) == 4
    assert sum(len(ranks) for kind, ranks in calls if kind == COUNTS) == 4
    assert sum(len(ranks) for kind, ranks in calls if kind == ROWS) > 2 * 4  # early, first turn, and more
    assert any(kind == CREDIT for kind, _ in calls)
    assert run_steps(CASE, groups, 4, first=1) == 16


def test_counts_that_were_written_over_are_refused(way: str, opened: Any) -> None:
    """Our own counts, as they came back, say more than we sent: nothing is read beyond our rows because of that."""
    groups = opened(CASE)
    steps = [dispatch(CASE, group, 0) for group in groups[:3]]
    gen = groups[0].generation
    gen.inbound.counts[steps[0].slot][0, 1] += 1
    steps.append(dispatch(CASE, groups[3], 0))
    with pytest.raises(ProtocolError, match="some other rank has written over them"):
        groups[0].dispatch_recv(steps[0])


@needs_c
def test_a_group_that_nobody_closed_leaves_no_bell_behind() -> None:
    """Its expectations end with the engine, after the group was forgotten."""
    with TransferEngine.open() as engine:
        groups = MoeGroup.open_many([engine], CASE.config, range(4), Table())
        dispatch(CASE, groups[0], 0)  # whose counts never come
        del groups
        gc.collect()
        with MoeGroup.open_many([engine], Case(ranks=1).config, [0], Table())[0] as other:
            assert run_steps(Case(ranks=1), [other], 2) == 2


@needs_c
def test_the_thread_comes_and_goes_with_the_groups() -> None:
    def running() -> int:
        tasks = Path("/proc/self/task").iterdir()
        return sum((task / "comm").read_text() == "fabric-moe\n" for task in tasks)

    gc.collect()
    with TransferEngine.open() as engine:
        for _ in range(3):
            groups = MoeGroup.open_many([engine], CASE.config, range(4), Table())
            assert run_steps(CASE, groups, 1) == 4
            assert running() == 1  # for all of them
            for group in groups:
                group.close()


@needs_c
@pytest.mark.parametrize("seed", range(3))
def test_transfers_of_the_proxy_are_settled(opened: Any, seed: int) -> None:
    """Many steps with turns: no transfer is left in the engine's hands, none is kept by the group."""
    case = Case(**{**vars(CASE), "seed": seed})
    groups = opened(case)
    assert run_steps(case, groups, 12) == 48
    for group in groups:
        group.generation.finish(10.0)
        for slot in range(case.config.depth):
            group.generation.settle(slot, 10.0)
            assert group.generation.transfers[slot] == []
    assert np.all([group.broken is None for group in groups])
