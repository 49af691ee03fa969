"""Python programs that tests talk to by lines of text: prefillers above all."""

from __future__ import annotations

import os
import queue
import secrets
import subprocess
import sys
import threading
from pathlib import Path

from fabric_core import NetAddr

PEER = Path(__file__).parent / "prefill_peer.py"
DEADLINE = 60.0  # seconds: the longest that anything may take which is meant to work


class Peer:
    """A running Python program that prints words and reads lines; the first word is its address."""

    def __init__(self, program: Path, *words: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(program), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "FABRIC_BACKENDS": "local", **environment},  # the others take their time to load
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
    """Starts peers, each for one test unless it is `shared`: starting one takes seconds on a busy machine."""

    def __init__(self, shared: dict[tuple[object, ...], Peer]) -> None:
        self.started: list[Peer] = []
        self._shared = shared

    def __call__(
        self,
        *,
        nics: int = 1,
        chunk: int = 0,
        dtype: str = "float32",
        pages: int = 256,
        name: str = "",
        shared: bool = True,
    ) -> Peer:
        words = (str(nics), str(chunk), dtype, str(pages))
        if shared and words in self._shared:
            return self._shared[words]
        peer = Peer(PEER, name or f"peer-{secrets.token_hex(4)}", *words)
        if shared:
            self._shared[words] = peer
        else:
            self.started.append(peer)
        return peer

    def run(self, program: Path, *words: str, **environment: str) -> Peer:
        self.started.append(Peer(program, *words, **environment))
        return self.started[-1]
