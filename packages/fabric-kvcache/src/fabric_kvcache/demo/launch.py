"""Runs both roles as processes of their own, and makes one outcome of what they say.

Each child writes JSON lines to stdout; a thread per child reads them into one queue. Nothing is waited for without a
deadline, and no child outlives this process.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Literal, Self

from pydantic import TypeAdapter, ValidationError

from fabric_core.cli.guard import BUG, PEER
from fabric_kvcache.demo.report import Error, Failed, Halfway, KvDemo, Prefilled, Ready, Result, Task, Text

__all__ = ["Demo", "DemoFailed", "Event", "Options", "run_demo", "same"]

Event = Error | Failed | Halfway | Prefilled | Ready | Result | Text
Role = Literal["prefiller", "decoder"]

_EVENT: TypeAdapter[Event] = TypeAdapter(Event)
_LOAD_TIMEOUT = 600.0  # seconds: importing torch and reading the model, on a busy machine with a cold disk
_LAST_WORDS = 5.0  # seconds: how long a failure of one child may take to be explained by the other
_SLACK = 10.0  # seconds: what a child may take beyond the timeout it was given


class DemoFailed(Exception):
    """One sentence, and the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    prompt: str
    max_new_tokens: int = 48
    page_tokens: int = 16
    chunk_tokens: int = 0
    nics: int | None = None
    backend: str = "auto"
    timeout: float = 60.0
    model: str | None = None

    def common(self) -> list[str]:
        words = ["--parent", str(os.getpid()), "--backend", self.backend, "--page-tokens", str(self.page_tokens)]
        words += ["--chunk-tokens", str(self.chunk_tokens)]
        if self.nics is not None:
            words += ["--nics", str(self.nics)]
        return words + (["--model", self.model] if self.model is not None else [])


@dataclass
class Child:
    """One process. `inbox` gets its events, and (name, None) at the end of its output."""

    name: str
    process: subprocess.Popen[str]
    stderr: IO[bytes]
    error: Error | None = None
    address: str = ""  #: of its engine, once it has said so
    thread: threading.Thread = field(init=False)

    def read_into(self, inbox: queue.Queue[tuple[str, Event | None]]) -> None:
        def read() -> None:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                with contextlib.suppress(ValidationError):  # a library printed something
                    inbox.put((self.name, _EVENT.validate_json(line)))
            inbox.put((self.name, None))

        self.thread = threading.Thread(target=read, name=f"fabric-demo-{self.name}", daemon=True)
        self.thread.start()

    def failure(self) -> DemoFailed:
        """Say why it ended, after its output has."""
        if self.error is not None:
            return DemoFailed(self.error.code, self.error.message)
        code = self.process.wait(_LAST_WORDS)
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            where = f", {self.address}" if self.address else ""
            return DemoFailed(PEER, f"the {self.name} process (pid {self.process.pid}{where}) was killed by {name}")
        self.stderr.seek(0)
        tail = self.stderr.read().decode(errors="replace").strip()[-2000:]
        return DemoFailed(BUG, f"the {self.name} process ended with code {code} without a result:\n{tail}")


def _environment(threads: int) -> dict[str, str]:
    """One thread count for every library under torch, no network, no progress bars."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
    }


class Demo:
    """The two processes of one run. A context manager: no child is left behind."""

    def __init__(self, options: Options, on_text: Callable[[Text], None], on_stage: Callable[[str], None]) -> None:
        self.options = options
        self.on_text = on_text
        self.on_stage = on_stage
        self.children: dict[str, Child] = {}
        self.ready: dict[str, Ready] = {}
        self.killed: set[str] = set()  #: those that may be gone
        self.inbox: queue.Queue[tuple[str, Event | None]] = queue.Queue()

    def run(self) -> KvDemo:
        options, token = self.options, secrets.token_hex(4)
        self.on_stage("starting a prefiller and a decoder, each loads the model ...")
        # A token is at least one byte of the prompt; the rest is room for the chat template.
        room = len(options.prompt.encode()) + 256
        self._start(
            "prefiller",
            ["--name", f"prefiller-{token}", "--requests", "1", "--pool-tokens", str(min(room, 1 << 16))],
        )
        self._start(
            "decoder",
            [
                *("--name", f"decoder-{token}"),
                *("--timeout", str(options.timeout), "--max-new-tokens", str(options.max_new_tokens)),
            ],
        )
        self._until(lambda: len(self.ready) == len(self.children), _LOAD_TIMEOUT, "loading the model")
        self.on_stage(f"prefiller {self.ready['prefiller'].address}, decoder {self.ready['decoder'].address}")
        self._tell("decoder", Task(prefiller=self.ready["prefiller"].address, prompt=options.prompt))
        results: dict[str, Event] = {}

        def keep(_name: str, event: Event) -> None:
            if isinstance(event, Result | Prefilled):
                results[event.event] = event

        # Twice: the same work is done once more in one process. Generation has no timeout of its own.
        limit = 2 * options.timeout + options.max_new_tokens * 2.0 + _SLACK
        self._until(lambda: len(results) == 2, limit, "prefill, transfer and generation", keep)
        result, prefilled = results["result"], results["prefilled"]
        assert isinstance(result, Result)
        assert isinstance(prefilled, Prefilled)
        return KvDemo(equal=same(result), decoder=result, prefiller=prefilled)

    def _start(self, role: Role, words: Sequence[str], name: str = "") -> None:
        name = name or role
        stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        # A session of its own: Ctrl-C reaches this process alone, which then ends the children.
        process = subprocess.Popen(
            [*self._program(role), *self.options.common(), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            encoding="utf-8",
            env=_environment(1),
            start_new_session=True,
        )
        child = self.children[name] = Child(name, process, stderr)
        child.read_into(self.inbox)

    def _program(self, role: Role) -> list[str]:
        return [sys.executable, "-m", f"fabric_kvcache.demo.{role}"]

    def _tell(self, name: str, task: Task) -> None:
        stdin = self.children[name].process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone; its end is in the inbox
            stdin.write(task.model_dump_json() + "\n")
            stdin.flush()

    def _until(
        self, done: Callable[[], bool], timeout: float, what: str, keep: Callable[[str, Event], None] | None = None
    ) -> None:
        end = time.monotonic() + timeout
        gone: set[str] = set()
        while not done():
            try:
                name, event = self.inbox.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                if gone:
                    raise self._failure(gone) from None
                raise DemoFailed(PEER, f"{what} took longer than {timeout:g} s; raise --timeout") from None
            if event is None and name in self.killed:
                continue
            if event is None:
                # A child that is gone before its time: the other one may know better why, e.g. name a lost peer.
                if self.children[name].process.wait(_LAST_WORDS) == 0 and not self._failed():
                    continue
                gone.add(name)
                if len(gone) == len(self.children) - len(self.killed) or self.children[name].error is not None:
                    raise self._failure(gone)
                end = min(end, time.monotonic() + _LAST_WORDS)
            elif isinstance(event, Error):
                self.children[name].error = event
            elif isinstance(event, Ready):
                self.ready[name] = event
                self.children[name].address = event.address
            elif isinstance(event, Text):
                self.on_text(event)
            elif keep is not None:
                keep(name, event)

    def _failed(self) -> bool:
        return any(child.error is not None for child in self.children.values())

    def _failure(self, gone: set[str]) -> DemoFailed:
        """Make one sentence of what the children that are gone had to say: causes before consequences."""
        failures = {name: self.children[name].failure() for name in sorted(gone)}
        killed = [failure for name, failure in failures.items() if self.children[name].error is None]
        told = [failure for name, failure in failures.items() if self.children[name].error is not None]
        if killed and told and killed[0].code == PEER:
            return DemoFailed(PEER, f"{killed[0]}; the other side says: {told[0]}")
        return (told or killed)[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self.children.values():
            process = child.process
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            if exc[0] is not None and process.poll() is None:
                process.terminate()
        for child in self.children.values():
            try:
                child.process.wait(_LAST_WORDS)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.thread.join(_LAST_WORDS)
            if child.process.stdout is not None:
                child.process.stdout.close()
            child.stderr.close()


def same(result: Result) -> bool:
    """Whether both ways gave the same: text, tokens, KV bytes and first logits."""
    told = result.text == result.one_text and result.tokens == result.one_tokens
    return told and bool(result.kv_equal) and bool(result.logits_equal)


def run_demo(options: Options, on_text: Callable[[Text], None], on_stage: Callable[[str], None]) -> KvDemo:
    """Run the demo. Raises DemoFailed with a sentence for people and the exit code."""
    with Demo(options, on_text, on_stage) as demo:
        return demo.run()
