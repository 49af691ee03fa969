"""Engines, groups in one thread, and ranks as processes; none outlives its test."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = str(Path(__file__).parent)
sys.path.append(HERE)  # tests share moe_cases.py, which pytest's importlib mode does not find by itself

import node_process  # noqa: E402
import rank_process  # noqa: E402
from moe_cases import Case  # noqa: E402

from fabric_core import TransferEngine  # noqa: E402
from fabric_moe import MoeGroup, Table, kernels  # noqa: E402

DEADLINE = 100.0  # seconds: the longest that anything may take which is meant to work

# Importing torch takes seconds: one process does it, and forks for each process that a test wants.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["rank_process", "node_process", "fabric_moe.bench_rank"])


class Ranks:
    """A process that runs `rank_process.serve`, or what else is given, with some ranks in it."""

    def __init__(
        self, case: Case, ranks: list[int], board: Path, *words: str, job: str = "moe", serve: Any = rank_process.serve
    ) -> None:
        self._pipe, theirs = FORKS.Pipe()
        arguments = (case.text(), ranks, f"file:{board}", job, list(words), theirs)
        self.process = FORKS.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def hear(self, word: str, timeout: float = DEADLINE) -> str:
        """Wait for its next line, which begins with `word`."""
        assert self._pipe.poll(timeout), f"no word within {timeout} s: {word} was expected"
        line = self._pipe.recv()
        assert isinstance(line, str)
        assert line.startswith(word), line
        return line

    def tell(self, line: str) -> None:
        self._pipe.send(line)

    def end(self) -> None:
        """Have it leave in good order."""
        self.tell("end")
        self.hear("bye")
        self.process.join(DEADLINE)
        assert self.process.exitcode == 0

    def close(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE)
        self._pipe.close()


class Starter:
    """Starts processes with ranks in them."""

    def __init__(self, board: Path) -> None:
        self.board = board
        self.started: list[Ranks] = []

    def __call__(
        self, case: Case, ranks: list[int], *words: str, job: str = "moe", serve: Any = rank_process.serve
    ) -> Ranks:
        self.started.append(Ranks(case, ranks, self.board, *words, job=job, serve=serve))
        return self.started[-1]

    def node(self, case: Case, rank: int, node: int) -> Ranks:
        """A rank of a NodeGroup, which takes steps until it loses another one."""
        self.started.append(Ranks(case, [rank], self.board, str(node), serve=node_process.serve))
        return self.started[-1]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path / "board")
    yield starter
    for ranks in starter.started:
        ranks.close()


@pytest.fixture(scope="session")
def engines() -> Iterator[list[TransferEngine]]:
    """Two engines that reorder what they deliver."""
    with TransferEngine.open(local_shuffle=11) as one, TransferEngine.open(local_shuffle=12) as two:
        yield [one, two]


class Opened:
    """Groups of one thread over some engines."""

    def __init__(self, engines: list[TransferEngine]) -> None:
        self.engines = engines
        self.groups: list[MoeGroup] = []

    def __call__(self, case: Case) -> list[MoeGroup]:
        made = MoeGroup.open_many(self.engines, case.config, range(case.ranks), Table(), device=case.device)
        self.groups += made
        return made

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self.groups.clear()


@pytest.fixture(params=["C", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the C part is used, or what takes its place where it was not built. Name it before `opened`."""
    if request.param == "numpy":
        monkeypatch.setattr(kernels, "NATIVE", None)
    elif kernels.NATIVE is None:
        pytest.skip("fabric-moe was built without its C part")
    return str(request.param)


@pytest.fixture
def opened(engines: list[TransferEngine]) -> Iterator[Opened]:
    opener = Opened(engines)
    yield opener
    opener.close()
