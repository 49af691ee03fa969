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
from fabric_core.conformance.kit import Memory, pattern

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
    with environment(FABRIC_VERBS_NICS=",".join(names)):
        return TransferEngine.open("cpu", "ibverbs", nics=len(names), **{"heartbeat": 10, "timeout": 60, **settings})


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """These variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def connect(a: TransferEngine, b: TransferEngine) -> tuple[Memory, Memory]:
    source, target = Memory(a, 65536, pattern(1, 65536)), Memory(b, 65536)
    a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0)).wait(DEADLINE)
    return source, target


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
def acknowledgements_lost(device: str) -> Iterator[None]:
    """What a device answers to writes and messages does not arrive; what it sends of its own does. RoCE v2 is UDP,
    whose first byte is the operation: 0x11 acknowledges, 28 bytes after the beginning of an IPv4 packet."""
    nic = device.replace("rxe", "nic")
    run("tc", "qdisc", "add", "dev", nic, "root", "handle", "1:", "prio")
    try:
        words = "protocol ip u32 match u8 0x11 0xff at 28 action drop"
        run("tc", "filter", "add", "dev", nic, "parent", "1:", *words.split())
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
    "acknowledgements_lost",
    "addressless",
    "connect",
    "devices",
    "environment",
    "eventually",
    "grown",
    "hardware",
    "need",
    "netem",
    "open_on",
    "pattern",
    "refused",
    "run",
    "unplugged",
]
