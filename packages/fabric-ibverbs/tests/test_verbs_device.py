"""What is said of a device that cannot serve, where there is none: a small libibverbs plays it (tests/fake)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FAKE = Path(__file__).with_name("fake")
OPEN = """
from fabric_core.config import Settings
from fabric_core.domain import GroupConfig
from fabric_core.errors import BackendError
from fabric_core.topology import Nic, Port
from fabric_ibverbs import backend, library
from fabric_ibverbs.nics import Choice
from fabric_ibverbs.options import Options

options = Options.load()
ffi, lib = library.load(options)
port = Port(1, "active", "linkup", "Ethernet", 100.0)
choice = Choice(Nic("fake0", ports=(port,), state="up"), port, options.gid or 0, 0)
try:
    backend._open_one(ffi, lib, GroupConfig("cpu", "x", 1, Settings()), options, choice, 7)
except BackendError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled."""
    compiler = shutil.which("cc")
    target = tmp_path_factory.mktemp("fake") / "libfake.so"
    sources = [str(path) for path in sorted(FAKE.glob("*.c"))]
    if compiler is None:
        pytest.skip("there is no C compiler")
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(target), *sources], capture_output=True, text=True, timeout=120
    )
    if "infiniband/verbs.h" in done.stderr:
        pytest.skip("needs libibverbs's headers (libibverbs-dev)")
    assert done.returncode == 0, done.stderr
    return target


def opened(fake: Path, says: str, **environment: str) -> str:
    """What opening that device ends with. In a process of its own: a library that is loaded stays."""
    env = {**os.environ, "FABRIC_VERBS_LIBRARY": str(fake), "FAKE_VERBS": says, **environment}
    done = subprocess.run([sys.executable, "-c", OPEN], capture_output=True, text=True, timeout=60, env=env)
    if "built without" in done.stderr:
        pytest.skip("built without libibverbs's headers")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("what", "value"),
    [("max_srq", 0), ("max_srq_wr", 100), ("max_cqe", 64), ("max_cq", 1), ("max_qp", 4), ("max_qp_wr", 1)],
)
def test_a_device_that_is_too_small_is_refused_with_what_it_lacks(fake: Path, what: str, value: int) -> None:
    """C6: some drivers have reliable connections, but no shared receive queues: the value and the cure are named."""
    said = opened(fake, f"{what}={value}")
    assert f"fake0: its driver says {what} = {value}, and this backend needs" in said
    assert "FABRIC_VERBS_NICS" in said


def test_an_empty_place_of_the_gid_table_is_refused(fake: Path) -> None:
    """C6: it reads as zeros, and nobody could be reached from there."""
    said = opened(fake, "", FABRIC_VERBS_GID="17")
    assert "index 17 of the GID table of port 1 is empty" in said
    assert "FABRIC_VERBS_GID" in said


def test_a_port_that_went_down_meanwhile_is_named(fake: Path) -> None:
    assert "fake0: port is not active: Network is down" in opened(fake, "down=1")


def test_a_device_that_does_not_answer_is_an_error(fake: Path) -> None:
    """Whichever sign its driver gives to what went wrong."""
    assert "fake0: device: Input/output error" in opened(fake, "mute=1")


def test_a_device_that_is_large_enough_gets_further(fake: Path) -> None:
    """So the tests above fail for their own reason: this one ends where the fake does."""
    assert "fake0: protection domain: Function not implemented" in opened(fake, "")
