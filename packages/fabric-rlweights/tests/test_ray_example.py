"""The example under Ray: actors exchange addresses, one is killed, and another one comes late."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "rl" / "ray_actors.py"


@pytest.mark.skipif(not EXAMPLE.is_file(), reason=f"no source tree: {EXAMPLE} is not there")
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'fabric-rlweights[ray]'"
)
@pytest.mark.timeout(280)
def test_the_ray_example() -> None:
    # Not tmp_path: the paths of sockets must be short. A token is given, or Ray writes one into the user's home.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as session:
        ray = {"RAY_TMPDIR": session, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), "--updates", "2", "--deadline", "220"],
            capture_output=True,
            text=True,
            timeout=250,
            env={**os.environ, **ray, "FABRIC_HEARTBEAT": "5"},
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    tensors = r"2 tensors at (\S+?)"
    for version in (1, 2):
        assert re.search(rf"^version {version} is right: {tensors}, {tensors}$", done.stdout, re.M), done.stdout
    killed = re.search(r"^the inference rank at (\S+) was killed$", done.stdout, re.M)
    survivor = re.search(rf"^version 3 is right: {tensors}$", done.stdout, re.M)
    late = re.search(rf"^one came late: {tensors}$", done.stdout, re.M)
    assert killed, done.stdout
    assert survivor, done.stdout
    assert late, done.stdout
    assert len({found[1] for found in (killed, survivor, late)}) == 3, done.stdout
    assert f"version 4 is right: 2 tensors at {survivor[1]}, 2 tensors at {late[1]}\n" in done.stdout
