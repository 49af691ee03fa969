"""After the suite nothing of an engine may be left in this process: no thread, no descriptor, no socket."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # what tests share, pytest's importlib mode does not find by itself


def _threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # it ended while we looked
            continue
    return [name for name in names if name.startswith("fabric")]


def _descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    cuda = os.path.exists("/dev/nvidiactl")  # its driver keeps eventfds of its own
    return [
        name
        for name in found
        if ("fabric" in name and "memfd" in name) or (name == "anon_inode:[eventfd]" and not cuda)
    ]


@pytest.fixture(scope="session", autouse=True)
def nothing_of_an_engine_is_left() -> Iterator[None]:
    """Fails the session's last test if an engine of the suite is still alive."""
    before = len(_descriptors())
    yield
    end = time.monotonic() + 10
    while time.monotonic() < end:
        gc.collect()
        if not _threads() and len(_descriptors()) <= before:
            return
        time.sleep(0.05)
    pytest.fail(f"left behind: threads {_threads()}, descriptors {_descriptors()}")
