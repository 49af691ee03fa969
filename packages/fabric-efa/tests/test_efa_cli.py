"""`fabric ping HOST` and `fabric bench --connect HOST`: two processes that know of each other only the machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

FABRIC = [sys.executable, "-m", "fabric_core.cli"]


def environ() -> dict[str, str]:
    """Nothing set: what is needed is on the command lines."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def serving(tcp: str, port: int) -> Iterator[str]:
    """`fabric bench --serve` in another process; yields the address that it prints."""
    words = ["bench", "--backend", "efa", "--provider", tcp, "--on", "127.0.0.2", "--port", str(port), "--serve", "far"]
    with subprocess.Popen([*FABRIC, *words], stdout=subprocess.PIPE, text=True, env=environ()) as process:
        timer = threading.Timer(60, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            timer.cancel()
            process.kill()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FABRIC, *words], capture_output=True, text=True, timeout=100, env=environ())


def test_a_machine_is_enough_to_ping_and_to_measure(serving: str, tcp: str, port: int) -> None:
    assert serving.startswith(f"efa:{tcp}/127.0.0.2:"), "--on and --provider"
    done = run("ping", f"127.0.0.2:{port}", "-n", "5", "-i", "0", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["data"]
    assert (report["sent"], report["lost"], report["address"]) == (5, 0, serving)
    done = run("bench", "write", "-b", "64K", "-n", "20", "--connect", "127.0.0.2", "--port", str(port), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["data"]
    assert (report["backend"], report["address"], report["rows"][0]["wrong_bytes"]) == ("efa", serving, 0)


def test_a_provider_is_chosen_on_the_command_line(unusable: Callable[[str, str], str]) -> None:
    """Also for the second process that bench starts itself; a provider that is not there is named."""
    if reason := unusable("shm", ""):
        pytest.skip(reason)
    done = run("bench", "write", "-b", "64K", "-n", "20", "--provider", "shm", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["data"]
    assert report["address"].startswith("efa:shm/")
    assert report["rows"][0]["wrong_bytes"] == 0
    done = run("ping", "--provider", "no-such-provider")
    assert done.returncode == 3
    assert "no-such-provider" in done.stderr
