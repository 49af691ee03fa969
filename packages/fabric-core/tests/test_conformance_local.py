"""The local backend passes the conformance kit, on each of its data paths."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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

#: What depends on how bytes move; the rest is the same on every path.
DATA = "test_c05 or test_c07 or test_c10 or test_property or test_verbs_write or test_verbs_paged or test_verbs_scatter"

RUNS = {
    "every contract, 1 and 2 NICs": ["--fabric-nics", "1", "2"],
    "data, 4 NICs": ["--fabric-nics", "4", "-k", DATA],
    "data by process_vm_writev": ["--fabric-nics", "2", "--fabric-set", "local_path=cma", "-k", DATA],
    "data by a bounce ring": ["--fabric-nics", "2", "--fabric-set", "local_path=bounce", "-k", DATA],
    "without reordering": ["--fabric-nics", "2", "--fabric-seed", "0", "-k", DATA],
    "spinning workers": ["--fabric-nics", "1", "--fabric-set", "polling=busy", "-k", "test_c03 or test_c10"],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", RUNS)
def test_the_local_backend_passes_the_kit(run: str, tmp_path: Path) -> None:
    command = [*KIT, "--fabric-backend", "local", "--fabric-scale", "quick", "--fabric-slack", "20", *RUNS[run]]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=880)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout[-8000:]}{ended.stderr[-2000:]}"
