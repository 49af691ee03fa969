"""What the tests on real queue pairs share: engines on named devices, netem, hardware counters.

The devices are those of tools/rdma-guest: rxe0 on nic0, whose cable's other end is port0, and so on.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fabric_core import TransferEngine
from fabric_core.conformance.kit import pattern

SYSFS = Path("/sys/class/infiniband")
DEADLINE = 90.0  #: seconds: the guest is slow, and slower on a busy machine


def devices() -> list[str]:
    """Names of the software RDMA devices here."""
    return sorted(path.name for path in SYSFS.glob("rxe*")) if SYSFS.is_dir() else []


def need(count: int) -> None:
    if len(devices()) < count:
        pytest.skip(f"needs {count} software RDMA devices, there are {len(devices())}: `make test-verbs`")


def open_on(*names: str, **settings: Any) -> TransferEngine:
    """An engine on these devices, in this order. Nobody is taken for dead soon: on a busy host a process may rest for
    seconds. Tests whose subject is death set `heartbeat`."""
    before = os.environ.get("FABRIC_VERBS_NICS")
    os.environ["FABRIC_VERBS_NICS"] = ",".join(names)
    try:
        return TransferEngine.open("cpu", "ibverbs", nics=len(names), **{"heartbeat": 10, "timeout": 60, **settings})
    finally:
        if before is None:
            del os.environ["FABRIC_VERBS_NICS"]
        else:
            os.environ["FABRIC_VERBS_NICS"] = before


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@contextmanager
def netem(device: str, *what: str) -> Iterator[None]:
    """Bad weather on the way out of a device: netem's words, as in: loss 1%."""
    nic = device.replace("rxe", "nic")
    run("tc", "qdisc", "add", "dev", nic, "root", "netem", *what)
    try:
        yield
    finally:
        run("tc", "qdisc", "del", "dev", nic, "root")


@contextmanager
def unplugged(device: str) -> Iterator[None]:
    """The cable of a device is pulled for a while."""
    port = device.replace("rxe", "port")
    run("ip", "link", "set", port, "down")
    try:
        yield
    finally:
        run("ip", "link", "set", port, "up")


@contextmanager
def addressless(device: str) -> Iterator[None]:
    """The interface of a device loses its address for a while, and with it the device its GID."""
    number = int(device.removeprefix("rxe"))
    address, nic = f"10.77.0.{number + 1}/16", f"nic{number}"
    run("ip", "addr", "del", address, "dev", nic)
    try:
        yield
    finally:
        run("ip", "addr", "add", address, "dev", nic)
        # with the last address went every route over it: this one puts its packets on the wire, see guest-net
        run("ip", "route", "replace", "10.77.0.0/16", "dev", nic, "table", str(200 + number))


def hardware(device: str) -> dict[str, int]:
    """The device's own counters."""
    folder = SYSFS / device / "ports" / "1" / "hw_counters"
    return {path.name: int(path.read_text()) for path in folder.iterdir() if path.name != "lifespan"}


def grown(device: str, before: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in hardware(device).items() if value != before[name]}


def refused(engine: TransferEngine) -> dict[str, int]:
    """What the engine's NICs have refused or met, by kind."""
    counts: dict[str, int] = engine.stats()["refused"]
    return counts


def eventually(true: Callable[[], bool], what: str, timeout: float = DEADLINE) -> None:
    """Polls until `true()`; for facts that nobody announces."""
    end = time.monotonic() + timeout
    while not true():
        if time.monotonic() > end:
            pytest.fail(f"not within {timeout:g} s: {what}")
        time.sleep(0.005)


__all__ = [
    "DEADLINE",
    "addressless",
    "devices",
    "eventually",
    "grown",
    "hardware",
    "need",
    "netem",
    "open_on",
    "pattern",
    "refused",
    "unplugged",
]
