"""examples/python_backend: it installs, is found by its entry point, and passes the kit. And the kit bites: planted
defects, one at a time, in that backend are each caught by the contract they break."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "python_backend"
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
ALL = ["--fabric-backend", "pysock", "--fabric-scale", "quick", "--fabric-slack", "20"]

pytestmark = pytest.mark.skipif(not EXAMPLE.is_dir(), reason=f"no source tree: {EXAMPLE} is not there")


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The example as a user would install it, in a folder of its own; returns the environment that finds it."""
    if importlib.util.find_spec("hatchling") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("needs pip and hatchling to install the example")
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--no-deps", "--target", folder, EXAMPLE], check=True, timeout=100)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parent}"}


def test_the_installed_example_is_found(installed: dict[str, str]) -> None:
    command = [sys.executable, "-m", "fabric_core.cli", "plugins", "--json"]
    shown = subprocess.run(command, env=installed, capture_output=True, text=True, timeout=60, check=True)
    (plugin,) = [plugin for plugin in json.loads(shown.stdout)["data"]["plugins"] if plugin["name"] == "pysock"]
    assert (plugin["package"], plugin["status"]) == ("fabric-pysock", "ok")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_passes_the_kit(installed: dict[str, str], tmp_path: Path) -> None:
    command = [*KIT, *ALL, "--fabric-nics", "1", "2"]
    ended = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True, timeout=880)
    assert ended.returncode == 0, f"{ended.stdout[-8000:]}{ended.stderr[-2000:]}"


# ---- planted defects: this module is what --fabric-import names, with KIT_DEFECT in the environment


def plant(defect: str) -> None:
    """Registers the example with one promise broken."""
    from fabric_pysock import backend as found
    from fabric_pysock import wire

    from fabric_core import registry
    from fabric_core.domain import Completion, CompletionKind

    module: Any = sys.modules[type(found).__module__]
    domain: Any = module.PySockDomain
    write, poll, take, lose = domain._write, domain.poll, domain._take, domain._lose

    if defect == "an immediate before its payload":

        def late(self: Any, frame: Any) -> int:
            region = self._regions.get(frame.key)
            if region is None or not frame.payload:
                return write(self, frame)  # type: ignore[no-any-return]
            self.__dict__.setdefault("late", []).append((self._now + 20_000_000, frame))
            return 0

        def later(self: Any, max: int, now: int) -> Any:
            done = poll(self, max, now)
            while self.__dict__.get("late") and self.late[0][0] < now:
                write(self, self.late.pop(0)[1])
            return done

        domain._write, domain.poll = late, later
    elif defect == "the last byte of a long write is lost":

        def short(self: Any, frame: Any) -> int:
            cut = frame.payload[:-1] if len(frame.payload) > 9000 else frame.payload
            return write(self, frame._replace(payload=cut))  # type: ignore[no-any-return]

        domain._write = short
    elif defect == "now and then an end is lost":

        def forgetful(self: Any, max: int, now: int) -> Any:
            lost = self.__dict__.setdefault("lost", [])
            kept: list[Any] = []
            for completion in poll(self, max, now):
                self.ends = self.__dict__.get("ends", 0) + (completion.kind == CompletionKind.OP)
                (lost if completion.kind == CompletionKind.OP and self.ends % 7 == 0 else kept).append(completion)
            return kept

        def found_again(self: Any, id: int) -> None:  # else the engine could only wait for it until it is closed
            self._done += [completion for completion in self.lost if completion.id == id]

        domain.poll, domain.cancel = forgetful, found_again
    elif defect == "an end comes twice":

        def twice(self: Any, max: int, now: int) -> Any:
            done = poll(self, max - 1, now) if max > 1 else []
            ends = [c for c in done if c.kind == CompletionKind.OP]
            return [*done, *ends[:1]]

        domain.poll = twice
    elif defect == "an immediate comes twice":

        def echo(self: Any, link: Any, frame: Any) -> None:
            take(self, link, frame)
            if frame.imm is not None and frame.seq % 5 == 0:
                self._done.append(Completion(CompletionKind.IMM, imm=frame.imm))

        domain._take = echo
    elif defect == "a revoked region stays open":
        domain.mr_dereg = lambda self, key: None
    elif defect == "ranges are not checked":

        def trusting(self: Any, frame: Any) -> int:
            ctypes.memmove(frame.addr, frame.payload, len(frame.payload))
            return 0 if frame.key in self._regions else errno.EKEYREVOKED

        domain._write = trusting
    elif defect == "the death of a peer goes unnoticed":

        def patient(self: Any, link: Any, status: int) -> None:
            if status not in (errno.ECONNRESET, errno.ETIMEDOUT):
                lose(self, link, status)

        domain._lose = patient
    elif defect == "the incarnation is not asked for":

        def careless(self: Any, link: Any, frame: Any) -> None:
            take(self, link, frame._replace(payload=b"") if frame.kind == wire.Kind.HELLO else frame)

        domain._take = careless
    elif defect == "a long message is cut to fit":

        def cutting(self: Any, link: Any, seq: int, message: bytes) -> None:
            deliver(self, link, seq, message[: self._buffers[0][2]] if self._buffers else message)

        deliver = domain._deliver
        domain._deliver = cutting
    elif defect:
        raise LookupError(defect)
    registry.register("pysock", found, replace=True)


#: defect -> a test of the kit that has to notice it
DEFECTS = {
    "an immediate before its payload": "test_the_payload_is_there_in_the_callback",
    "the last byte of a long write is lost": "test_a_write_with_an_immediate_delivers",
    "now and then an end is lost": "test_each_callback_is_called_once",
    "an end comes twice": "test_a_random_mix",
    "an immediate comes twice": "test_many_writes_in_flight",
    "a revoked region stays open": "test_a_revoked_region_refuses",
    "ranges are not checked": "test_a_damaged_descriptor",
    "the death of a peer goes unnoticed": "test_what_is_in_flight_to_a_killed_peer",
    "the incarnation is not asked for": "test_whoever_never_met",
    "a long message is cut to fit": "test_a_message_longer_than_the_posted_buffer",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_caught(installed: dict[str, str], tmp_path: Path, defect: str) -> None:
    environment = {**installed, "KIT_DEFECT": defect}
    more = ["--fabric-nics", "1", "-x", "-k", DEFECTS[defect], "--fabric-set", "timeout=3"]
    more += ["--fabric-import", Path(__file__).stem]
    command = [*KIT, *ALL, *more]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    caught = ended.returncode in (pytest.ExitCode.TESTS_FAILED, -signal.SIGSEGV)  # a wild write may well be the end
    assert caught, f"not noticed: {ended.stdout[-4000:]}{ended.stderr[-2000:]}"


if "KIT_DEFECT" in os.environ:
    plant(os.environ["KIT_DEFECT"])
