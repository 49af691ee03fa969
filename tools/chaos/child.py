"""A worker as the supervisor holds it: its process, its pipes, its fate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos.plan import WorkerOptions

__all__ = ["Child"]

_HERE = Path(__file__).resolve().parent


class Child:
    """One process. Nothing here blocks: a stopped process does not read its pipe."""

    def __init__(self, options: WorkerOptions) -> None:
        self.number = options.number
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}
        self.process = subprocess.Popen(
            [sys.executable, str(_HERE), "worker", options.to_json()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0, env=environment,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self.out = self.process.stdin, self.process.stdout
        for pipe in (self._in, self.out):
            os.set_blocking(pipe.fileno(), False)
        self._unsent = b""
        self._unread = b""

    def order(self, do: str, **fields: Any) -> None:
        self._unsent += json.dumps({"do": do, **fields}).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what fits."""
        while self._unsent:
            try:
                sent = self._in.write(self._unsent)
            except (BrokenPipeError, ValueError):
                self._unsent = b""
                return
            if not sent:
                return
            self._unsent = self._unsent[sent:]

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it has said since the last call; raises EOFError at its end, once everything was handed out."""
        ended = False
        while True:
            chunk = self.out.read(1 << 16)
            if not chunk:
                ended = chunk is not None
                break
            self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            yield json.loads(line)
        if ended:
            raise EOFError

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def reap(self, timeout: float = 10.0) -> int:
        """Wait for its end, which must be near, and let go of everything."""
        status = self.process.wait(timeout)
        self._in.close()
        return status

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-3000:]

    def close(self) -> None:
        self.out.close()
        self._log.close()
