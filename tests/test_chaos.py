"""A minute of chaos on the local backend (R3 R4 R5 R6 R7 R9 R11 R16), and proof that the runner notices bugs (R13)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHAOS = Path(__file__).resolve().parent.parent / "tools" / "chaos"
SLACK = "15"  # seconds that a busy CI machine may be late


def run(tmp_path: Path, *arguments: str, within: float) -> tuple[int, dict[str, Any], str]:
    """Run the chaos; returns its status, its result and what it printed."""
    out = tmp_path / "chaos.json"
    command = [sys.executable, str(CHAOS), "--quiet", "--slack", SLACK, "--out", str(out), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=within)
    assert out.exists(), f"{ended.stdout[-3000:]}{ended.stderr[-3000:]}"
    return ended.returncode, json.loads(out.read_text()), f"{ended.stdout[-6000:]}{ended.stderr[-2000:]}"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_r16_a_minute_of_chaos_breaks_nothing(tmp_path: Path) -> None:
    """Kills, stops, restarts and closes under load: see tools/chaos/supervisor.py for what has to hold meanwhile."""
    status, result, text = run(tmp_path, "--seconds", "60", "--seed", "7", within=380)
    assert status == 0, text
    assert sum(result["events"].values()) >= 10, "nothing much was done to anybody"
    assert result["totals"]["verified"] > 500, "hardly any load"
    assert any(spread["count"] for spread in result["loss_named_after_s"].values())
    assert result["flat"], "nobody lived long enough to be measured"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_r16_chaos_over_nics_that_fail_breaks_nothing(tmp_path: Path) -> None:
    """The same over faults: completions come late, in any order, or not at all; requests fail; queues are short."""
    plan = "reorder,delay=1ms,drop=0.0005,fail=0.0005:EIO,refuse=0.01:500us,partial=0.2,rnr=0.05,seed=5"
    status, result, text = run(tmp_path, "--seconds", "25", "--processes", "5", "--faults", plan, within=280)
    assert status == 0, text
    assert result["totals"]["verified"] > 100, "hardly any load"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_r13_the_chaos_runner_notices_each_planted_bug(tmp_path: Path) -> None:
    """One bug in each process: a leak, an end too many, an end too few, wrong bytes, a late write, a count too many, a
    loss that is kept quiet."""
    sys.path.insert(0, str(CHAOS.parent))
    try:
        from chaos.planted import PLANTS
    finally:
        sys.path.remove(str(CHAOS.parent))
    status, result, text = run(tmp_path, "--seconds", "40", "--slack", "2", "--plant", within=280)
    assert status == 1, text
    said = {found["what"] for found in result["breaks"]}
    missed = [bug for bug, what in PLANTS.values() if what not in said]
    assert not missed, f"not noticed: {missed}\n{text}"


def _children(pid: int) -> list[int]:
    return [int(one.name) for one in Path("/proc").glob("[0-9]*") if _stat(int(one.name))[1] == str(pid)]


def _stat(pid: int) -> list[str]:
    """State, parent, ... of a process; state "X" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def _alive(pid: int) -> bool:
    return _stat(pid)[0] not in "ZX"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose name leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as path:
        yield Path(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seconds", "0"), "--seconds 0: 14 to 1e"),
        (("--nics", "9"), "--nics: 1 to 8"),
        (("--processes", "2"), "3 or more"),
        (("--rate", "-1"), "--rate -1"),
        (("--faults", "drop=2"), "drop=2.0: a share is a number from 0 to 1"),
    ],
)
def test_r16_options_that_would_prove_nothing_are_refused(arguments: tuple[str, ...], said: str) -> None:
    command = [sys.executable, str(CHAOS), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stdout
    assert said in ended.stderr


@pytest.mark.timeout(60)
def test_r9_workers_die_with_their_supervisor(short_path: Path) -> None:
    """Killed in the middle, it leaves no process behind."""
    command = [sys.executable, str(CHAOS), "--quiet", "--processes", "3", "--seconds", "60"]
    supervisor = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(short_path)})
    try:
        end = time.monotonic() + 20
        while len(workers := _children(supervisor.pid)) < 3 or not list(short_path.glob("*/*.sock")):
            assert time.monotonic() < end, f"only {len(workers)} workers"
            assert supervisor.poll() is None, "it ended by itself"
            time.sleep(0.02)
    finally:
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait(10)
    end = time.monotonic() + 10
    while any(map(_alive, workers)):
        assert time.monotonic() < end, f"alive: {[pid for pid in workers if _alive(pid)]}"
        time.sleep(0.02)
