"""R9: engines that were opened, used and closed leave nothing behind, however often (1,000 times here).

`FABRIC_CYCLES=10000 pytest packages/fabric-core/tests/test_open_close.py` is the long form.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fabric_core import TransferEngine, registry

CYCLES = int(os.environ.get("FABRIC_CYCLES", "1000"))
WARM_UP = 100
ALLOWED_GROWTH = 2 << 20  # of the resident set over all cycles: the allocator's, not a cycle's


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def shared_memory() -> int:
    """Mappings of memory that is shared with peers."""
    return sum("memfd:" in line or "/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines())


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cycle(number: int) -> None:
    """Two engines that know each other move a write with an immediate and a message, in both kinds of memory."""
    with TransferEngine.open() as sender, TransferEngine.open() as receiver:
        source = np.full(4096, number % 251, np.uint8)
        handle, _ = sender.reg_mr(source)
        target = receiver.empty(8192)
        _, desc = receiver.reg_mr(target)
        came = threading.Event()
        receiver.submit_recvs(64, 2, lambda message: came.set())
        imm = receiver.alloc_imm()
        expected = receiver.expect_imm_count(imm, 1, timeout=20)
        sender.submit_single_write(4096, imm, (handle, 0), (desc, 100), timeout=20).wait(20)
        sender.submit_send(receiver.address, b"done", timeout=20).wait(20)
        expected.wait(20)
        assert came.wait(20)
        assert bytes(memoryview(target)[100:4196]) == source.tobytes()


def settled(before: tuple[int, int, int]) -> tuple[int, int, int]:
    """What is open now; a thread may need a moment to be gone from /proc after it was joined."""
    end = time.monotonic() + 10
    while True:
        gc.collect()
        now = descriptors(), threads(), shared_memory()
        if all(n <= b for n, b in zip(now, before, strict=True)) or time.monotonic() > end:
            return now
        time.sleep(0.01)


def main() -> None:
    """Prints what was open before and after, and how many bytes the process grew by."""
    # it reads all installed metadata, which is most of the time
    vars(registry)["entry_points"] = lambda group: ()
    for number in range(WARM_UP):
        cycle(number)
    gc.collect()
    before = settled((descriptors(), threads(), shared_memory()))
    memory = resident()
    for number in range(CYCLES):
        cycle(number)
    print(json.dumps({"before": before, "after": settled(before), "grown": resident() - memory}))


@pytest.mark.timeout(60 + CYCLES)
def test_r9_open_and_close_leave_nothing_behind() -> None:
    """In a process of its own: the allocator of a long test run grows by itself."""
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=50 + CYCLES, check=False)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    before, after = said["before"], said["after"]
    assert all(a <= b for a, b in zip(after, before, strict=True)), (
        f"descriptors, threads, mappings: {before} -> {after}"
    )
    assert said["grown"] < ALLOWED_GROWTH, f"{said['grown'] / CYCLES:.0f} bytes a cycle"


if __name__ == "__main__":
    main()
