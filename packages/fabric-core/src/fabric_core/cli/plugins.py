"""`fabric plugins`: who plugs in, and the quick conformance run of a backend."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Annotated

import typer

from fabric_core.cli.guard import BAD, CANNOT, guarded, say
from fabric_core.cli.models import CheckRun, PluginRow, Plugins, Report
from fabric_core.cli.options import Json, Verbose
from fabric_core.cli.render import Column, console, emit_json, show_table, text_lines
from fabric_core.config import Settings
from fabric_core.errors import BackendError
from fabric_core.registry import discover, get_backend

__all__ = ["command", "gather", "run_check"]

#: The quick subset takes seconds; a backend that hangs must not hang the command.
CHECK_SECONDS = 600


def gather() -> list[PluginRow]:
    """Load every plug-in and tell what became of it."""
    names = ("name", "group", "package", "version", "api_version", "status", "reason", "cure", "traceback")
    found = discover(allow=Settings.load().backends)
    return [PluginRow(**{name: getattr(plugin, name) for name in names}) for plugin in found]


def run_check(backend: str) -> CheckRun:
    """Run the quick part of the conformance kit in a process of its own; its output goes to stderr."""
    if importlib.util.find_spec("pytest") is None:
        raise BackendError(
            "the conformance tests need pytest, which is not installed: pip install pytest pytest-timeout"
        )
    words = ["-q", "--pyargs", "fabric_core.conformance", "--fabric-backend", backend, "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    say(f"$ {' '.join(command)}")
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return CheckRun(backend=backend, exit_code=124, summary=f"not finished after {CHECK_SECONDS} s")
    print(done.stdout, file=sys.stderr, end="", flush=True)
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return CheckRun(backend=backend, exit_code=done.returncode, summary=lines[-1] if lines else "no output")


@guarded
def command(
    check: Annotated[
        str, typer.Option("--check", metavar="BACKEND", help="Also run the quick conformance tests of this backend.")
    ] = "",
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Backends and commands that are installed, and why some are not used.

    Exit code 1: a plug-in is broken, or the conformance run failed.
    """
    checks = []
    if check:
        get_backend(check)  # a misspelt or broken one is told as such, not as a failed test
        checks.append(run_check(check))
    data = Plugins(plugins=gather(), checks=checks)
    problems = [f"{row.name}: {row.reason}" for row in data.plugins if row.status in ("failed", "incompatible")]
    if json:
        emit_json(Report[Plugins](schema="fabric.plugins/1", data=data, problems=problems))
    else:
        _show(data, verbose)
    if any(run.exit_code == 4 for run in checks):  # pytest: it could not be started like this
        raise typer.Exit(CANNOT)
    if problems or any(run.exit_code for run in checks):
        raise typer.Exit(BAD)


def _show(data: Plugins, verbose: bool) -> None:
    out = console()
    columns = [
        Column("NAME"),
        Column("KIND"),
        Column("PACKAGE"),
        Column("VERSION", drop=2),
        Column("API", right=True, drop=3),
        Column("STATUS", status=True),
        Column("REASON", text=True),
    ]
    rows = [
        [
            row.name,
            row.group.rpartition(".")[2].rstrip("s"),
            row.package,
            row.version or "-",
            "-" if row.api_version is None else str(row.api_version),
            row.status,
            f"{row.reason}; {row.cure}" if row.cure else row.reason,
        ]
        for row in data.plugins
    ]
    show_table(out, columns, rows)
    if verbose:
        for row in data.plugins:
            if row.traceback:
                text_lines(out, "", f"{row.name} (from {row.package}):", row.traceback.rstrip())
    for run in data.checks:
        text_lines(out, "", f"conformance of {run.backend}: {run.summary} (exit code {run.exit_code})")
