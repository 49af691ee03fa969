"""`fabric ping` and `fabric bench` between two NICs: two processes that know of each other only the machine.

Needs software RDMA devices as tools/rdma-guest makes them (`make test-verbs`); skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from verbs_rig import need

pytestmark = [pytest.mark.nic, pytest.mark.slow, pytest.mark.timeout(400)]

FABRIC = [sys.executable, "-m", "fabric_core.cli"]
HERE, THERE, HOST = "rxe0", "rxe1", "10.77.0.2"


@pytest.fixture(autouse=True)
def _devices() -> None:
    need(2)


def environ() -> dict[str, str]:
    """What is needed is on the command lines; but nobody is taken for dead because the emulated machine is slow."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}
    return {**rest, "FABRIC_HEARTBEAT": "10"}


@pytest.fixture
def serving() -> Iterator[str]:
    """`fabric bench --serve` in another process, on another NIC; yields the address that it prints."""
    words = ["bench", "--backend", "ibverbs", "--on", THERE, "--serve", "far"]
    with subprocess.Popen([*FABRIC, *words], stdout=subprocess.PIPE, text=True, env=environ()) as process:
        timer = threading.Timer(380, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            timer.cancel()
            process.kill()


def fabric(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [*FABRIC, *words, "--json"], capture_output=True, text=True, timeout=180, env=environ(), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    data: dict[str, Any] = json.loads(done.stdout)["data"]
    return data


def test_a_machine_is_enough_to_ping_and_to_measure(serving: str) -> None:
    """Over the wire between two NICs, found by an IP address; the data are compared."""
    pinged = fabric("ping", HOST, "--backend", "ibverbs", "--on", HERE, "-n", "5", "-i", "0", "-t", "60")
    assert (pinged["sent"], pinged["lost"], pinged["address"]) == (5, 0, serving)
    assert pinged["local_nics"] != pinged["remote_nics"]
    for op, size in (("write", "64K"), ("imm", "64"), ("sendrecv", "4K")):
        words = ["bench", op, "-b", size, "-n", "20", "--backend", "ibverbs", "--on", HERE, "--connect", HOST]
        measured = fabric(*words)
        (row,) = measured["rows"]
        assert (measured["backend"], measured["address"], row["wrong_bytes"]) == ("ibverbs", serving, 0)


def test_the_second_process_is_started_if_there_is_none() -> None:
    """Both on one NIC, whose own loopback carries it."""
    measured = fabric("bench", "write", "-b", "64K", "-n", "20", "--backend", "ibverbs", "--on", HERE)
    assert (measured["backend"], measured["rows"][0]["wrong_bytes"]) == ("ibverbs", 0)
