"""Starts the processes of a job, speaks to them, and leaves none behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from fabric_core import ConfigError, DeadlineExceeded, PeerLost, TransferEngine
from fabric_rlweights.controller import Controller
from fabric_rlweights.job.model import Model
from fabric_rlweights.job.wire import text_of
from fabric_rlweights.plan import Options
from fabric_rlweights.report import UpdateReport

__all__ = ["Child", "Job", "Setup", "start", "tidy_when_terminated"]


@dataclass(frozen=True)
class Setup:
    """What a job is made of. `tp` and `replicate` are of the trainers' mesh; what is left of them is FSDP."""

    model: Model
    trainers: int = 4
    receivers: int = 2
    tp: int = 2
    replicate: int = 1
    watermark: int = 256 << 20
    double_buffer: bool = False
    baselines: bool = False
    digests: bool = False
    seed: int = 0
    dtype: str = "bfloat16"  #: of plain trainers' weights; float32: they are cast on their way
    piece_bytes: int = 16 << 20
    start_timeout: float = 120.0
    trainer: str = "fabric_rlweights.job.trainer"  #: the module, or a script's path, that a trainer process runs
    receiver: str = "fabric_rlweights.job.receiver"
    device: str = "cpu"  #: of the engines, and of the weights of those programs that know of it (job/on_device.py)
    offloaded: bool = False  #: the trainers' parameters lie in host memory all the same
    fp8: bool = False  #: matrices become fp8 on the way


class Child:
    """One process; answers are read by a thread of its own."""

    def __init__(
        self, role: str, rank: int, program: str, words: list[str], env: Mapping[str, str] | None = None
    ) -> None:
        self.role, self.rank = role, rank
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        fixed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            [sys.executable, *([program] if program.endswith(".py") else ["-m", program]), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **fixed, **(env or {})},
            start_new_session=True,
        )
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"fabric-job-{role}{rank}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def tell(self, do: str, **more: Any) -> None:
        """Give it a word."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone; whoever waits for its answer hears so

    def hear(self, timeout: float) -> dict[str, Any]:
        """Wait for its next answer. Raises PeerLost with its last words, DeadlineExceeded."""
        try:
            found = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise DeadlineExceeded(f"{self.role} {self.rank} did not answer within {timeout:g} s") from None
        if found is None:
            self._stderr.seek(0)
            tail = self._stderr.read().decode(errors="replace").strip()[-1500:]
            raise PeerLost(f"{self.role} {self.rank} ended with code {self.process.wait(5)}: {tail}")
        return found

    def close(self) -> None:
        """Let it end, or end it; it was told to."""
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout, self._stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a word that nobody reads any more
                    pipe.close()


def tidy_when_terminated() -> None:
    """Have SIGTERM end this program by an exception, so that its job is closed and leaves no files behind."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)


def start(setup: Setup, role: str, rank: int, controller: str, folder: str) -> Child:
    """Start a trainer or receiver of a controller anywhere. `folder`: where torch's processes find each other."""
    s = setup
    words = [
        f"--rank={rank}", f"--trainers={s.trainers}", f"--receivers={s.receivers}", f"--tp={s.tp}",
        f"--replicate={s.replicate}", f"--parent={os.getpid()}", f"--controller={controller}",
        f"--model={text_of(s.model)}", f"--watermark={s.watermark}", f"--seed={s.seed}", f"--dtype={s.dtype}",
        f"--device={s.device}",
        f"--store={folder}/{'all' if s.baselines else 'trainers'}",
    ]  # fmt: skip
    flags = {"--double-buffer": s.double_buffer, "--offloaded": s.offloaded, "--fp8": s.fp8}
    words += [flag for flag, given in flags.items() if given]
    return Child(role, rank, s.trainer if role == "trainer" else s.receiver, words)


class Job:
    """A controller in this process, and children. A context manager."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._folder = tempfile.mkdtemp(prefix="fabric-rl-")
        self.engine = TransferEngine.open()
        self.controller = Controller(
            self.engine,
            trainers=setup.trainers,
            receivers=setup.receivers,
            options=Options(piece_bytes=setup.piece_bytes),
            digests=setup.digests,
        )
        self.trainers: list[Child] = []
        self.receivers: list[Child] = []

    def __enter__(self) -> Job:
        try:
            for rank in range(self.setup.trainers):
                self.trainers.append(self.start("trainer", rank))
            for rank in range(self.setup.receivers):
                self.receivers.append(self.start("receiver", rank))
            until = time.monotonic() + self.setup.start_timeout
            for child in [*self.trainers, *self.receivers]:
                self._is_up(child, until)
            self.controller.wait_ready(max(1.0, until - time.monotonic()))
        except BaseException:
            self.close()
            raise
        return self

    def _is_up(self, child: Child, until: float) -> None:
        """Wait for a process's first answer, and for the end of any: the others would wait for that one in vain.

        Raises PeerLost with the last words of one that ended, ConfigError if there can be no plan, DeadlineExceeded.
        """
        while True:
            for other in [*self.trainers, *self.receivers]:
                if other.process.poll() is not None:
                    while True:  # until its last words
                        other.hear(5.0)
            if self.controller.problem:
                raise ConfigError(self.controller.problem)
            try:
                child.hear(min(0.2, max(0.01, until - time.monotonic())))
                return
            except DeadlineExceeded:
                if time.monotonic() > until:
                    raise DeadlineExceeded(
                        f"{child.role} {child.rank} was not up within {self.setup.start_timeout:g} s"
                    ) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, role: str, rank: int) -> Child:
        """Start a process; its first answer says that it is up."""
        return start(self.setup, role, rank, str(self.engine.address), self._folder)

    def all(self, children: Iterable[Child], do: str, timeout: float = 60.0, **more: Any) -> list[dict[str, Any]]:
        """Give all the same word, and wait for all answers."""
        children = list(children)
        for child in children:
            child.tell(do, **more)
        until = time.monotonic() + timeout
        return [child.hear(max(0.1, until - time.monotonic())) for child in children]

    def update(self, version: int, timeout: float = 60.0) -> tuple[UpdateReport, list[dict[str, Any]]]:
        """Have all trainers push; returns the controller's report and theirs."""
        answers = self.all(self.trainers, "push", timeout + 10.0, version=version, seconds=timeout)
        return self.controller.wait_report(version, timeout), answers

    def close(self) -> None:
        """End everything."""
        children = [*self.trainers, *self.receivers]
        for child in children:
            child.tell("exit")
        for child in children:
            child.close()
        self.controller.close()  # last: it hears that they leave
        self.engine.close()
        shutil.rmtree(self._folder, ignore_errors=True)
