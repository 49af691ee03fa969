"""The deterministic simulator: seeds hold the contracts, replay to the same hash, and a crash is told with its seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fabric_core import sim
from fabric_core.errors import ConfigError

FABRIC = [sys.executable, "-m", "fabric_core.cli"]
SECONDS = 240


def fabric(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FABRIC, "sim", *words], capture_output=True, text=True, timeout=SECONDS, check=False)


def test_seeds_hold_the_contracts() -> None:
    """C1..C8, C10, R1, R2, R4, R6, R7, R8: the checkers of every run, over a few hundred seeds with faults."""
    transfers, faults, bad = 0, 0, []
    for result in sim.run_many(range(1000, 1200), {"transfers": 500}, os.cpu_count() or 1):
        transfers += result.counts.get("transfers", 0)
        faults += sum(result.faults.values())
        if result.violation:
            bad.append(f"seed {result.seed}: {result.violation}")
    assert not bad, "\n".join(bad)
    assert transfers >= 100_000
    assert faults > 1000


def test_a_calm_network_delivers_everything() -> None:
    """R1: without a fault, a cancel or a deadline everything is done and every expectation fires."""
    calm = {option.name: option.calm for option in sim.options()} | {"transfers": 20_000, "nics": 4, "shard_bytes": 64}
    result = sim.run(7, calm)
    assert result.violation == ""
    assert result.counts["done"] == result.counts["transfers"] >= 20_000
    assert result.counts["fired"] >= 20_000
    assert result.faults == {}


def test_replays_are_the_same_run() -> None:
    """R12: 100 of 100 replays have the hash of the first run, in processes of their own and in this one."""
    here = {seed: sim.run(seed, {"transfers": 200}).hash for seed in range(1, 51)}
    for result in sim.run_many(list(here) * 2, {"transfers": 200}, 2):
        assert result.hash == here[result.seed], result.seed
    assert len(set(here.values())) == len(here)


def test_replay_and_trace_on_the_command_line() -> None:
    done = fabric("replay", "3", "--times", "3", "--set", "transfers=100", "--trace")
    assert done.returncode == 0, done.stderr
    assert "3 runs, one hash" in done.stdout
    assert "landed" in done.stdout
    assert "fired" in done.stdout


def test_a_violation_is_told_with_its_seed_and_the_command() -> None:
    """A run that cannot settle in no time at all: the liveness checker must say so, and minimise keep it."""
    change = ["--set", "settle_ns=0", "--set", "transfers=50", "--set", "latency_ns=100000"]
    done = fabric("run", "--seeds", "2", "--first", "5", *change, "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert [item["seed"] for item in report["violations"]] in ([5], [6], [5, 6], [6, 5])
    found = report["violations"][0]
    assert found["violation"].startswith("not settled: ")
    assert found["replay"].startswith(f"fabric sim replay {found['seed']} --set settle_ns=0")
    again = fabric(*found["replay"].split()[2:])
    assert again.returncode == 1
    assert found["violation"] in again.stdout
    small = fabric("minimise", str(found["seed"]), *change)
    assert small.returncode == 0, small.stderr
    assert "not settled: " in small.stdout
    assert "fabric sim replay" in small.stdout


def test_a_dead_child_is_a_violation_with_its_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SIGSEGV inside the engine must not be taken for a good run, nor end the command."""
    (tmp_path / "sitecustomize.py").write_text(
        "import fabric_core.sim as sim, os, signal\n"
        "real = sim.run\n"
        "def run(seed, *rest, **more):\n"
        "    if seed == 12: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    return real(seed, *rest, **more)\n"
        "import runpy, sys\n"
        "sim.run = run\n"
        "if sys.orig_argv[1:3] == ['-m', 'fabric_core.sim']:\n"
        "    sim._serve(sys.stdin, sys.stdout); os._exit(0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results = {r.seed: r for r in sim.run_many(range(11, 15), {"transfers": 50}, 1)}
    assert sorted(results) == [11, 12, 13, 14]
    assert results[12].violation.startswith("crash: ")
    assert "SIGSEGV" in results[12].violation
    assert not any(results[seed].violation for seed in (11, 13, 14))

    told = fabric("replay", "12", "--set", "transfers=50")
    assert told.returncode == 1
    assert "seed 12: run 1 of 2 did not end" in told.stdout
    assert "DIFFERENT" not in told.stdout


def test_r9_a_child_ends_with_its_parent() -> None:
    """Killed in the middle of a seed, the command leaves no process that computes on for nobody."""
    words = [*FABRIC, "sim", "run", "--seeds", "1", "--jobs", "1", "--transfers", "100000000"]
    parent = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{parent.pid}/task")
    try:
        end = time.monotonic() + 60
        while not (found := [n for task in children.iterdir() for n in (task / "children").read_text().split()]):
            assert time.monotonic() < end
            assert parent.poll() is None
            time.sleep(0.05)
        stat = Path(f"/proc/{found[0]}/stat")
        while int(stat.read_text().rpartition(")")[2].split()[11]) < 200:  # two seconds of its own: it is at the seed
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    end = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end, "it goes on"
        time.sleep(0.05)


def test_seeds_beyond_64_bits_are_refused() -> None:
    for words in (("replay", str(1 << 64)), ("run", "--first", str(1 << 64)), ("options", str(1 << 64))):
        assert fabric(*words).returncode == 2
    many = fabric("run", "--first", str((1 << 64) - 1), "--seeds", "2")
    assert many.returncode == 2
    assert "seeds end at" in many.stderr


def test_options_are_named_and_checked() -> None:
    assert sim.expand(5) == sim.expand(5)
    assert sim.expand(5) != sim.expand(6)
    assert sim.expand(5, {"nodes": 4})["nodes"] == 4
    with pytest.raises(ConfigError, match="no option 'noodles'"):
        sim.expand(5, {"noodles": 4})
    with pytest.raises(ConfigError, match="cannot run"):
        sim.run(5, {"nodes": 1})
    wrong = fabric("run", "--set", "nodes")
    assert wrong.returncode == 2
    assert "NAME=VALUE" in wrong.stderr
    table = fabric("options", "5")
    assert table.returncode == 0
    assert {line.split()[0] for line in table.stdout.splitlines()} >= {"NAME", "nodes", "latency_ns", "nic_every_ns"}
