"""Exit codes: the one place that turns an outcome into a number.

0    good
1    it ran, and the answer is bad (a check failed, data were wrong, conformance failed)
2    usage: the command line or a setting makes no sense
3    this machine cannot: no device, no permission, a library or plug-in is missing
4    the peer: unreachable, refused, timed out, lost
5    our bug; prints the path of a report
130  interrupted
"""

from __future__ import annotations

import functools
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import ParamSpec

import typer

from fabric_core._version import __version__
from fabric_core.errors import (
    BackendError,
    ConfigError,
    FabricError,
    ProtocolError,
    QueueFull,
    TransferError,
    Unsupported,
    WaitTimeout,
)

__all__ = [
    "BAD",
    "BUG",
    "CANNOT",
    "GOOD",
    "INTERRUPTED",
    "PEER",
    "USAGE",
    "exit_code",
    "guarded",
    "say",
    "write_report",
]

GOOD = 0
BAD = 1
USAGE = 2
CANNOT = 3
PEER = 4
BUG = 5
INTERRUPTED = 130

P = ParamSpec("P")

_CODES: tuple[tuple[type[FabricError], int], ...] = (
    (ConfigError, USAGE),
    (ProtocolError, USAGE),  # an address or a dump, given on the command line
    (TransferError, PEER),
    (WaitTimeout, PEER),
    (QueueFull, PEER),
    (BackendError, CANNOT),
    (Unsupported, CANNOT),
)


def exit_code(error: BaseException) -> int:
    """Return the exit code for an exception; BUG for whatever nobody expected."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    if isinstance(error, ImportError) and "fabric_core._native" in f"{error.name} {error}":
        return CANNOT
    return BUG


def say(text: str) -> None:
    """Print a line for people: to stderr, never into the result."""
    print(text, file=sys.stderr, flush=True)


def fail(error: BaseException) -> int:
    """Tell the user about an exception and return the exit code."""
    code = exit_code(error)
    if code == INTERRUPTED:
        say("interrupted")
    elif code == BUG:
        say(f"internal error: {type(error).__name__}: {error}")
        say(f"a report was written to {write_report(error)}; please attach it to an issue")
    elif isinstance(error, ImportError):
        say(f"error: the compiled engine is missing ({error}); install a wheel, or run `make native` in a checkout")
    else:
        say(f"error: {error}")
    return code


def silence() -> None:
    """Send stdout nowhere: its reader (head, less) had enough, and the interpreter would complain at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a typer command: its exceptions become exit codes."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            silence()
            raise typer.Exit(GOOD) from None
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, (typer.Exit, typer.Abort)) or hasattr(error, "exit_code"):
                raise  # typer's own, e.g. a bad parameter
            raise typer.Exit(fail(error)) from None

    return run


def write_report(error: BaseException) -> str:
    """Write traceback, versions and command line to a private file and return its path."""
    handle, path = tempfile.mkstemp(prefix="fabric-report-", suffix=".txt", text=True)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(f"fabric-core {__version__}, Python {platform.python_version()}, {platform.platform()}\n")
        file.write(f"command: {sys.argv}\n\n")
        file.write("".join(traceback.format_exception(error)))
    return path
