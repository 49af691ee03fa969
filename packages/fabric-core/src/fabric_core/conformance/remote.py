"""Drives `peer.py`: a peer in a process of its own that can be killed, stopped and asked."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

import pytest

from fabric_core import MrDesc, NetAddr
from fabric_core.conformance.kit import DEADLINE, Kit


class RemoteRaised(Exception):
    """A verb raised in the peer's process."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['type']}: {error['text']}")
        self.type: str = error["type"]
        self.error = error


@dataclass(frozen=True)
class RemoteMemory:
    """A region that the peer registered."""

    owner: Remote
    number: int
    desc: MrDesc
    blob: str  # the descriptor as JSON carries it

    def get(self, offset: int = 0, length: int | None = None) -> bytes:
        return base64.b64decode(self.owner.do("get", memory=self.number, offset=offset, length=length))

    def crc(self, offset: int = 0, length: int | None = None) -> int:
        return int(self.owner.do("crc", memory=self.number, offset=offset, length=length))

    def holds(self, data: bytes, offset: int = 0) -> bool:
        return self.crc(offset, len(data)) == zlib.crc32(data)


class Remote:
    """The peer's process. Start it from the test's main thread: it dies with the thread that started it."""

    def __init__(self, kit: Kit, *, nics: int = 1, name: str | None = None, **settings: Any) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fabric_core.conformance.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
        )
        self._last_words = ""  # its log, once it is gone
        self._unread = b""
        try:
            opened = self.do(
                "open",
                within=DEADLINE + kit.slack,  # a Python starts and imports before it answers
                backend=kit.backend,
                nics=nics,
                name=name,
                settings={**kit.settings, **settings},
                imports=list(kit.imports),
            )
        except BaseException:
            self.kill()
            raise
        self.address = NetAddr.parse(opened)

    # ---- verbs

    def do(self, verb: str, *, within: float = DEADLINE, **arguments: Any) -> Any:
        request = json.dumps({"do": verb, **arguments}).encode() + b"\n"
        try:
            self._write(request)
            answer = json.loads(self._read_line(time.monotonic() + within))
        except (BrokenPipeError, EOFError):
            pytest.fail(f"the peer's process ended during {verb!r}:\n{self.log()}")
        except TimeoutError:
            pytest.fail(f"the peer did not answer {verb!r} within {within:g} s:\n{self.log()}")
        if "error" in answer:
            raise RemoteRaised(answer["error"])
        return answer["ok"]

    def memory(
        self, nbytes: int, *, seed: int | None = None, byte: int = 0, shared: bool = True, write: bool = True
    ) -> RemoteMemory:
        made = self.do("memory", nbytes=nbytes, seed=seed, byte=byte, shared=shared, write=write)
        desc = MrDesc.from_bytes(base64.b64decode(made["desc"]))
        return RemoteMemory(self, made["number"], desc, made["desc"])

    def alloc_imm(self) -> int:
        return int(self.do("alloc_imm"))

    def expect(
        self,
        imm: int,
        count: int,
        *,
        timeout: float | None = DEADLINE,
        peers: list[NetAddr] | None = None,
        ranges: list[tuple[int, int, int]] | None = None,
    ) -> int:
        addresses = [str(peer) for peer in peers or []]
        return int(self.do("expect", imm=imm, count=count, timeout=timeout, peers=addresses, ranges=ranges or []))

    def wait(self, operation: int, timeout: float = DEADLINE) -> dict[str, Any]:
        answer: dict[str, Any] = self.do("wait", operation=operation, timeout=timeout, within=timeout + DEADLINE)
        return answer

    def ends_well(self, operation: int, timeout: float = DEADLINE) -> dict[str, Any]:
        answer = self.wait(operation, timeout)
        assert answer["state"] == "done", answer
        return answer

    def messages(self, pool: int, count: int = 0, timeout: float = DEADLINE) -> list[bytes]:
        got = self.do("got", pool=pool, count=count, timeout=timeout, within=timeout + DEADLINE)
        return [base64.b64decode(message) for message in got]

    # ---- fate

    def stop(self) -> None:
        """SIGSTOP, and wait until the kernel says that it stands still."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def cont(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(DEADLINE)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if not self._log.closed:
            self._last_words = self.log()
            self._log.close()

    def close(self) -> None:
        """Close the engine in order, then end the process."""
        if self._process.returncode is None:
            try:
                self.do("close", timeout=5.0)
            finally:
                self.kill()

    def log(self) -> str:
        if self._log.closed:
            return self._last_words
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]

    # ---- pipes

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    def _read_line(self, end: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            readable, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
            if not readable:
                raise TimeoutError
            chunk = os.read(fd, 1 << 20)
            if not chunk:
                raise EOFError
            self._unread += chunk
        line, _newline, self._unread = self._unread.partition(b"\n")
        return line


@dataclass
class Remotes:
    """Starts peers in processes of their own and ends them after the test, however it went."""

    kit: Kit
    started: list[Remote] = field(default_factory=list)

    def start(self, **how: Any) -> Remote:
        remote = Remote(self.kit, **how)
        self.started.append(remote)
        return remote

    def end(self) -> None:
        for remote in self.started:
            remote.kill()
