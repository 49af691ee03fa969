"""The backend "sim": the conformance kit in one process, the times of a NIC, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from fabric_core import TransferEngine
from fabric_core.errors import BackendError, ConfigError

KIT = [
    sys.executable,
    "-m",
    "pytest",
    "-p",
    "no:cacheprovider",
    "-q",
    "--tb=short",
    "--pyargs",
    "fabric_core.conformance",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_passes_the_kit(tmp_path: Path) -> None:
    """Every contract that can be seen inside one process (R14)."""
    words = ["--fabric-backend", "sim", "--fabric-scale", "quick", "--fabric-slack", "20", "--fabric-nics", "1", "2"]
    ended = subprocess.run([*KIT, *words], cwd=tmp_path, capture_output=True, text=True, timeout=880)
    assert ended.returncode == 0, f"{ended.stdout[-8000:]}{ended.stderr[-2000:]}"


def _write(nic: str, size: int) -> float:
    """Seconds of one write."""
    with (
        TransferEngine.open("cpu", "sim", nics=1, sim_nic=nic, sim_seed=1) as a,
        TransferEngine.open("cpu", "sim", nics=1, sim_nic=nic, sim_seed=1) as b,
    ):
        source, target = a.empty(size), b.empty(size)
        with memoryview(source) as view:
            view[:] = bytes(range(256)) * (size // 256)
        handle, _ = a.reg_mr(source)
        _, desc = b.reg_mr(target)
        a.submit_single_write(256, None, (handle, 0), (desc, 0)).wait(10)  # contact
        begin = time.perf_counter()
        a.submit_single_write(size, None, (handle, 0), (desc, 0)).wait(10)
        seconds = time.perf_counter() - begin
        with memoryview(source) as ours, memoryview(target) as theirs:
            assert ours == theirs
        return seconds


def test_a_nic_takes_its_time() -> None:
    """64 MiB over 100 Gbit/s at 92% take 5.8 ms; no machine is asked to be faster than some bound."""
    assert _write("efa-p5", 64 << 20) >= 0.0058
    assert _write("none", 1 << 20) < 5


def test_two_engines_of_one_name_and_an_unknown_nic_are_refused() -> None:
    with TransferEngine.open("cpu", "sim", name="twice"):
        with pytest.raises(BackendError, match="sim backend 'twice'"):
            TransferEngine.open("cpu", "sim", name="twice")
        with pytest.raises(ConfigError, match="sim_nic"):
            TransferEngine.open("cpu", "sim", sim_nic="cx9")
    TransferEngine.open("cpu", "sim", name="twice").close()  # free again
