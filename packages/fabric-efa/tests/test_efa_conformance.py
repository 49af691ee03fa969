"""The conformance kit over real providers, each in a process of its own (a library once loaded stays).

Providers of Debian's libfabric and, as a second and newer library, those of the `mpich` wheel if it is installed.
Known defects of providers are deselected here with their reason and version; docs/efa.md lists them. shm is not here:
the kit opens several engines in one process, which shm of 1.17 and 2.5 does not survive (test_efa_links.py tests
it between processes).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(290),
    pytest.mark.skipif(find_spec("fabric_efa._native") is None, reason="built without libfabric's headers"),
]

#: The whole kit, in parts that take a minute or two each.
PARTS = {
    "verbs": "test_verbs",
    "peers": "test_c11 or test_c08",
    "ends": "test_c01 or test_c03 or test_c06 or test_c07",
    "rest": "not test_verbs and not test_c11 and not test_c08 and not test_c01 and not test_c03 and not test_c06 "
    "and not test_c07",
}
#: Enough to tell that a provider works at all: data, immediates, messages, loss, revocation.
CORE = {"core": "test_c02 or test_c10 or test_verbs_write or test_verbs_send or revoked or killed"}


@dataclass(frozen=True)
class Run:
    """One run of the kit."""

    provider: str
    newer: bool = False  #: with the library of the mpich wheel
    nics: tuple[int, ...] = (1, 2)
    parts: dict[str, str] = field(default_factory=lambda: CORE)
    environ: dict[str, str] = field(default_factory=dict)
    deselected: dict[str, str] = field(
        default_factory=dict
    )  #: which tests, as for pytest's -k -> the provider's defect

    @property
    def name(self) -> str:
        return "-".join([self.provider, "mpich" if self.newer else "debian", *self.environ])


#: One endpoint for all peers, as on EFA; but EFA ends by its own time-outs what a stopped peer holds.
STOPPED = {"ours_again_after_a_failure and (deadline or cancel)": "tcp never ends a write to a stopped peer"}
STRICT = {"FABRIC_EFA_STRICT": "11"}
RUNS = (
    Run("net", nics=(1, 2, 4), parts=PARTS),
    Run("net", nics=(2,), environ=STRICT),
    Run("net", parts={"ends": "test_c07 or test_c11"}, environ=STRICT, deselected=STOPPED),
    Run("net", nics=(4,), environ={"FABRIC_EFA_NICS": "127.0.0.2,127.0.0.3,127.0.0.4,127.0.0.5"}),
    Run("tcp", newer=True),
    Run("tcp", nics=(1,)),
)
CASES = [pytest.param(run, part, id=f"{run.name}-{name}") for run in RUNS for name, part in run.parts.items()]


@pytest.mark.parametrize(("run", "part"), CASES)
def test_the_kit(run: Run, part: str, tmp_path: Path, newer_library: str, unusable: Callable[[str, str], str]) -> None:
    """R14: all of it on the native sockets provider, its core on the others."""
    library = newer_library if run.newer else ""
    if run.newer and not library:
        pytest.skip("the mpich wheel, which holds a newer libfabric, is not installed")
    if not run.newer and (reason := unusable(run.provider, "127.0.0.1")):
        pytest.skip(reason)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}
    environ |= {"FABRIC_EFA_PROVIDER": run.provider, "FABRIC_EFA_LIBRARY": library, **run.environ}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=short"]
    command += ["--pyargs", "fabric_core.conformance", "--fabric-backend", "efa", "--fabric-scale", "quick"]
    command += ["--fabric-slack", "20", "--fabric-nics", *map(str, run.nics)]
    command += ["-k", " and ".join([f"({part})", *(f"not ({tests})" for tests in run.deselected)])]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, f"{ended.stdout[-8000:]}{ended.stderr[-2000:]}"
