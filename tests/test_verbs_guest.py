"""fabric-ibverbs in a virtual machine with software RDMA NICs: a part of `make test-verbs`.

The machine is emulated and takes minutes of both cores, so this runs where it is asked for (FABRIC_TEST_GUEST=1), and
is skipped, with the reason, where such a machine cannot be had without installing packages.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
GUEST = ROOT / "tools" / "rdma-guest" / "run_in_guest.py"
PROGRAMS = GUEST.with_name("build_programs.py")
SECONDS = 1500


def guest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fabric_run_in_guest", GUEST)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.nic
@pytest.mark.timeout(SECONDS + 60)
def test_verbs_in_a_virtual_machine() -> None:
    """R14: the kit's core with one NIC, and loss, bursts, refused writes, strangers, on real queue pairs."""
    if os.environ.get("FABRIC_TEST_GUEST") != "1":
        pytest.skip("takes minutes of an emulated machine: FABRIC_TEST_GUEST=1, or `make test-verbs`")
    reason = guest().cannot()
    if reason:
        pytest.skip(f"no virtual machine: {reason}")
    if not list((ROOT / "packages/fabric-ibverbs/src/fabric_ibverbs").glob("_native.*so")):
        pytest.skip("fabric-ibverbs was built without libibverbs's headers (libibverbs-dev)")
    subprocess.run([sys.executable, str(PROGRAMS)], cwd=ROOT, timeout=SECONDS, check=True)
    command = [sys.executable, str(GUEST), "--nics", "2", "--timeout", str(SECONDS), "--stats", "--"]
    done = subprocess.run(
        [*command, str(ROOT / "tools/rdma-guest/run_tests.sh"), "quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS + 30,
        check=False,
    )
    if done.returncode == 125:  # the guest itself, not what ran in it
        pytest.skip(f"the virtual machine did not come up: {done.stderr[-500:]}")
    assert done.returncode == 0, f"{done.stdout[-8000:]}{done.stderr[-3000:]}"
