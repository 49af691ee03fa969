"""Looks for one bug with the test that should find it."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from planted.table import Bug
from planted.workshop import Workshop

RUNS = 5  # of a test that depends on the moment
TEST_SECONDS = 180
HUNT_SECONDS = 3600
TSAN_ENV = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "abort_on_error=0:detect_stack_use_after_return=1"}


@dataclass(frozen=True)
class Find:
    """What came of a hunt. `after`: seeds or runs until it was found, or all of them."""

    found: bool
    by: str
    after: int
    seconds: float
    words: str = ""


def _run(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, check=False, capture_output=True, text=True, errors="replace", timeout=seconds, env=TSAN_ENV
    )


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    return "hangs" if -returncode == signal.SIGVTALRM else f"dies of {signal.Signals(-returncode).name}"


def _first_words(text: str) -> str:
    """The line of a test's output that says what is wrong."""
    for pattern in (r"^SUMMARY: .*$", r"^[^\n:]*\.[ch]:\d+: .*$", r"^.*runtime error.*$"):
        if found := re.search(pattern, text, re.MULTILINE):
            return re.sub(r"\S*/", "", found.group(0)).strip()
    return text.strip().splitlines()[-1] if text.strip() else ""


def run_test(program: Path, name: str, runs: int = RUNS) -> Find:
    """Run a C test until it fails, at most `runs` times."""
    start = time.monotonic()
    for run in range(1, runs + 1):
        try:
            done = _run([str(program)], TEST_SECONDS)
        except subprocess.TimeoutExpired:
            return Find(True, name, run, time.monotonic() - start, f"hangs for {TEST_SECONDS} s")
        if done.returncode:
            words = _first_words(done.stdout + done.stderr) or _ending(done.returncode)
            return Find(True, name, run, time.monotonic() - start, words)
    return Find(False, name, runs, time.monotonic() - start)


def run_seeds(program: Path, seeds: int, first: int = 1, options: tuple[str, ...] = ()) -> Find:
    """Run simulated seeds until a checker objects. Raises RuntimeError if the hunt itself cannot run."""
    start = time.monotonic()
    command = [str(program), str(first), str(seeds), *options]
    try:
        done = _run(command, HUNT_SECONDS)
        out, returncode, err = done.stdout, done.returncode, done.stderr
    except subprocess.TimeoutExpired as late:
        out, returncode, err = (late.stdout or b"").decode(), -signal.SIGVTALRM, ""
    seconds = time.monotonic() - start
    told = re.findall(r"^seed (\d+)$", out, re.MULTILINE)
    if returncode == 2 or not told:
        raise RuntimeError(f"{' '.join(command)}: {err.strip() or _ending(returncode)}")
    after = int(told[-1]) - first + 1
    if returncode == 0:
        return Find(False, "sim", after, seconds)
    violation = re.search(r"^violation (.*)$", out, re.MULTILINE)
    words = violation.group(1) if violation else _ending(returncode)
    checker = words.split(":", 1)[0] if violation else "watchdog"
    return Find(True, f"sim, {checker}", after, seconds, words)


def hunt(shop: Workshop, bug: Bug, seeds: int) -> Find:
    """Plant the bug, and look for it. Raises OutOfDate or BuildFailed."""
    tree = shop.tree(bug)
    try:
        if bug.hunter == "sim":
            return run_seeds(shop.hunt(tree), seeds)
        name, flavour = bug.hunter.split(":")
        return run_test(shop.test(tree, name, flavour), f"{name}, {flavour}")
    finally:
        shop.forget(bug)


def hunt_nothing(shop: Workshop, hunter: str, seeds: int) -> Find:
    """Run a hunter on the engine as it is: a find is a false alarm (or a real bug)."""
    tree = shop.tree(None)
    if hunter == "sim":
        return run_seeds(shop.hunt(tree), seeds)
    name, flavour = hunter.split(":")
    return run_test(shop.test(tree, name, flavour), f"{name}, {flavour}", runs=2)
