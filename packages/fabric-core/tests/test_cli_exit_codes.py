"""Exit codes, one by one (see fabric_core/cli/guard.py), and plug-ins that must not hurt."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fabric_core import errors
from fabric_core.cli import build, guard
from fabric_core.cli.app import COMMANDS

Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Put a package that adds a command onto the path of subprocesses."""

    def make(name: str, entry: str, source: str) -> None:
        (tmp_path / f"{name}_mod.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nSummary: Does {name}\n")
        (info / "entry_points.txt").write_text(f"[fabric.commands]\n{entry}\n")

    return make


def fabric(*argv: str, path: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the real thing in a process of its own."""
    env = {**os.environ, **environ}
    env.pop("COLUMNS", None)  # pytest-xdist sets it; tables into a pipe are not cut
    if path is not None:
        env["PYTHONPATH"] = f"{path}:{env.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "fabric_core.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


def test_0_good() -> None:
    done = fabric("version")
    assert (done.returncode, done.stderr) == (0, "")


def test_1_the_answer_is_bad() -> None:
    done = fabric("doctor", FABRIC_NICS="99")
    assert done.returncode == 1
    assert "FABRIC_NICS = '99': must be an integer from 1 to 8" in done.stdout


@pytest.mark.parametrize(
    "argv", [["nope"], ["explain"], ["devices", "--nope"], ["bench", "nope"], ["ping", "-n", "0"], ["explain", "NOPE"]]
)
def test_2_usage(argv: list[str]) -> None:
    done = fabric(*argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Error" in done.stderr


@pytest.mark.parametrize("argv", [["env"], ["devices"], ["plugins"]])
def test_2_a_setting_makes_no_sense(argv: list[str]) -> None:
    done = fabric(*argv, FABRIC_POLLING="x")
    assert done.returncode == 2
    assert "error: FABRIC_POLLING = 'x': must be auto, busy or adaptive" in done.stderr


def test_2_an_unknown_backend_is_usage_and_names_the_known() -> None:
    done = fabric("devices", "-b", "locla")
    assert done.returncode == 2
    assert "did you mean local?" in done.stderr


def test_2_a_file_that_is_no_dump(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert fabric("topo", "--from", str(tmp_path / "x.json")).returncode == 2
    assert fabric("topo", "--from", str(tmp_path / "none.json")).returncode == 2
    assert fabric("topo", "--dump", str(tmp_path / "no" / "x.json")).returncode == 2


def test_3_a_broken_command_breaks_only_itself(install: Install, tmp_path: Path) -> None:
    install("sad", "sad = sad_mod:app", "raise RuntimeError('boom')")
    done = fabric("sad", "run", "--fast", path=tmp_path)
    assert done.returncode == 3
    assert "`fabric sad` of sad 1.0 is not usable: RuntimeError: boom" in done.stderr
    listing = fabric("--help", path=tmp_path)
    assert listing.returncode == 0
    assert "Does sad (from sad)" in listing.stdout
    assert fabric("version", path=tmp_path).returncode == 0
    shown = fabric("plugins", path=tmp_path)
    assert shown.returncode == 1
    assert re.search(r"sad +command +sad +1\.0 +(- +)?failed +RuntimeError: boom", shown.stdout)


def test_3_an_entry_point_that_is_no_typer_app(install: Install, tmp_path: Path) -> None:
    install("odd", "odd = odd_mod:app", "app = 7")
    done = fabric("odd", path=tmp_path)
    assert done.returncode == 3
    assert "its entry point is no typer app" in done.stderr


def test_a_good_command_is_attached_with_its_own_exit_code(install: Install, tmp_path: Path) -> None:
    source = """
import typer
app = typer.Typer()
@app.command()
def run(fast: bool = False):
    print("ran", fast)
    raise typer.Exit(1 if fast else 0)
@app.command()
def other():
    pass
"""
    install("happy", "happy = happy_mod:app", source)
    done = fabric("happy", "run", "--fast", path=tmp_path)
    assert (done.returncode, done.stdout) == (1, "ran True\n")
    assert "run" in fabric("happy", "--help", path=tmp_path).stdout


def test_help_does_not_import_commands_of_others(install: Install, tmp_path: Path) -> None:
    install("spy", "spy = spy_mod:app", "print('IMPORTED')")
    for argv in (["--help"], ["version"], ["nope"]):
        assert "IMPORTED" not in fabric(*argv, path=tmp_path).stdout


def test_nobody_can_replace_a_command_of_core(install: Install, tmp_path: Path) -> None:
    install("thief", "version = thief_mod:app", "print('STOLEN')")
    done = fabric("version", path=tmp_path)
    assert done.returncode == 0
    assert "STOLEN" not in done.stdout


def test_4_nobody_answers(tmp_path: Path) -> None:
    done = fabric("ping", "local:nobody-there", "-t", "1", FABRIC_LOCAL_DIR=str(tmp_path / "d"))
    assert done.returncode == 4, done.stderr
    assert "nobody-there" in done.stderr
    assert done.stdout == ""


def test_5_our_bug_writes_a_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("fabric_core.cli.version.gather", lambda: 1 / 0)
    result = CliRunner().invoke(build(["version"]), ["version"])
    assert result.exit_code == 5
    assert "internal error: ZeroDivisionError: division by zero" in result.stderr
    (report,) = tmp_path.glob("fabric-report-*.txt")
    assert str(report) in result.stderr
    assert "Traceback" in report.read_text()
    assert report.stat().st_mode & 0o077 == 0


def test_130_interrupted(tmp_path: Path) -> None:
    env = {**os.environ, "FABRIC_LOCAL_DIR": str(tmp_path / "d")}
    command = [sys.executable, "-m", "fabric_core.cli", "ping", "--name", "answerer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline().startswith("local:answerer")
            child.send_signal(signal.SIGINT)
            assert child.wait(20) == 130
        finally:
            child.kill()


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m fabric_core.cli env | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1)
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 2),
        (errors.ProtocolError("x"), 2),
        (errors.Unsupported("x"), 3),
        (errors.BackendError("x"), 3),
        (ImportError("x", name="fabric_core._native"), 3),
        (errors.PeerLost("x"), 4),
        (errors.PeerRestarted("x"), 4),
        (errors.DeadlineExceeded("x"), 4),
        (errors.RemoteAccessError("x"), 4),
        (errors.WaitTimeout("x"), 4),
        (errors.QueueFull("x"), 4),
        (errors.BadRange("x"), 5),
        (errors.EngineClosed("x"), 5),
        (ImportError("x", name="something"), 5),
        (ValueError("x"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_exception_has_its_exit_code(error: BaseException, code: int) -> None:
    assert guard.exit_code(error) == code


def test_every_fabric_error_is_mapped_on_purpose() -> None:
    """A new class in errors.py must be thought about here."""
    ours = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)} - {"Code"}
    bugs = {"BadRange", "EngineClosed", "FabricError", "StaleHandle"}
    assert {name for name in ours if guard.exit_code(getattr(errors, name)("x")) == guard.BUG} == bugs


def test_every_command_is_guarded() -> None:
    for name in COMMANDS:
        (command,) = [c for c in build([name]).registered_commands if c.name == name]
        assert command.callback is not None
        assert hasattr(command.callback, "__wrapped__"), name


def test_typer_exceptions_pass_the_guard() -> None:
    @guard.guarded
    def command() -> None:
        raise typer.Exit(7)

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == 7
