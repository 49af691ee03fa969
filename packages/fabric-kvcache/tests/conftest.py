"""Prefillers in processes of their own; none outlives its test."""

from __future__ import annotations

import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric_core import NetAddr, TransferEngine

PEER = Path(__file__).parent / "peer.py"
DEADLINE = 30.0  # seconds: the longest that anything may take which is meant to work


class Peer:
    """A running `peer.py`."""

    def __init__(self, mode: str, *, nics: int, chunk: int, dtype: str, pages: int) -> None:
        words = [f"peer-{secrets.token_hex(4)}", mode, str(nics), str(chunk), dtype, str(pages)]
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="test-peer-reader")
        self._reader.start()
        self.address = NetAddr.parse(self.hear(""))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))

    def hear(self, word: str) -> str:
        """Wait for its next line, which begins with `word`."""
        line = self._lines.get(timeout=DEADLINE)
        assert line.startswith(word), line
        return line

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(DEADLINE)

    def close(self) -> None:
        self.kill()
        self._reader.join(DEADLINE)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Peers:
    """Starts peers."""

    def __init__(self) -> None:
        self.started: list[Peer] = []

    def __call__(
        self, mode: str = "serve", *, nics: int = 1, chunk: int = 0, dtype: str = "float32", pages: int = 64
    ) -> Peer:
        self.started.append(Peer(mode, nics=nics, chunk=chunk, dtype=dtype, pages=pages))
        return self.started[-1]


@pytest.fixture
def peers() -> Iterator[Peers]:
    starter = Peers()
    yield starter
    for peer in starter.started:
        peer.close()


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine.open() as opened:
        yield opened
