"""libfabric's shm crashes when two engines of one process talk to each other: they are refused with a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

#: Two engines here and one in another process: a pair of one process is refused, both ways; the others talk.
TALK = """
import os, subprocess, sys
from fabric_core import MrDesc, TransferEngine, TransferError

def hello(e, desc):
    source = bytearray(b"hello")
    handle, _ = e.reg_mr(source)
    e.submit_single_write(5, None, (handle, 0), (desc, 0), timeout=20).wait(30)

far = subprocess.Popen([sys.executable, "-c", '''
import sys
from fabric_core import TransferEngine
e = TransferEngine.open("cpu", "efa")
memory = e.empty(64)
print(e.reg_mr(memory)[1].to_bytes().hex(), flush=True)
sys.stdin.read()
print(bytes(memory[:5]).decode(), flush=True)
e.close()
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
try:
    there = MrDesc.from_bytes(bytes.fromhex(far.stdout.readline()))
    engines = [TransferEngine.open("cpu", "efa") for _ in range(2)]
    memories = [e.empty(64) for e in engines]
    descs = [e.reg_mr(memory)[1] for e, memory in zip(engines, memories)]
    for e, desc in zip(engines, descs[::-1]):
        try:
            hello(e, desc)
        except TransferError as error:
            print(error)
    for e in engines:
        hello(e, there)
    engines[1].close()
    hello(engines[0], there)
    engines[0].close()
    print(far.communicate("", timeout=30)[0].strip())
finally:
    far.kill()
"""

#: A process of our own number was killed once, and the provider's files, named by it, are still there.
LEFT = """
import os, struct, subprocess, sys
from fabric_core import TransferEngine

ENGINE = "import sys; from fabric_core import TransferEngine; e = TransferEngine.open('cpu', 'efa'); "
killed = subprocess.Popen(
    [sys.executable, "-c", ENGINE + "print('up', flush=True); sys.stdin.read()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
)
mine = []
try:
    assert killed.stdout.readline() == "up\\n"
    for name in [name for name in os.listdir("/dev/shm") if name.startswith(f"{killed.pid}:")]:
        with open(f"/dev/shm/{name}", "rb") as file:
            data = file.read()
        mine.append(f"/dev/shm/{os.getpid()}:{name.partition(':')[2]}")
        at = data[:256].index(struct.pack("i", killed.pid))
        with open(mine[-1], "wb") as file:
            file.write(data[:at] + struct.pack("i", os.getpid()) + data[at + 4 :])
        os.unlink(f"/dev/shm/{name}")
    killed.kill()
    with TransferEngine.open("cpu", "efa"):
        print(len(mine), "in the way")
finally:
    killed.kill()
    for name in mine:
        if os.path.exists(name):
            os.unlink(name)
"""


@pytest.mark.parametrize("newer", [False, True], ids=["debian", "mpich"])
def test_two_engines_of_a_process_are_refused_and_nothing_crashes(
    newer: bool, newer_library: str, unusable: Callable[[str, str], str]
) -> None:
    library = newer_library if newer else ""
    if newer and not library:
        pytest.skip("the mpich wheel, which holds a newer libfabric, is not installed")
    if not newer and (reason := unusable("shm", "")):
        pytest.skip(reason)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}
    environ |= {"FABRIC_EFA_PROVIDER": "shm", "FABRIC_EFA_LIBRARY": library, "FABRIC_BACKEND": "efa"}
    ended = subprocess.run([sys.executable, "-c", TALK], capture_output=True, text=True, timeout=120, env=environ)
    assert ended.returncode == 0, ended.stderr[-2000:]
    *refused, arrived = ended.stdout.splitlines()
    assert len(refused) == 2
    assert all("two engines of one process cannot talk to each other" in text for text in refused)
    assert arrived == "hello"


def test_what_a_killed_process_left_is_not_in_the_way(unusable: Callable[[str, str], str]) -> None:
    """Process numbers come again; an engine must not fail to open by the chance of its own."""
    if reason := unusable("shm", ""):
        pytest.skip(reason)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}
    environ |= {"FABRIC_EFA_PROVIDER": "shm", "FABRIC_BACKEND": "efa"}
    ended = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=120, env=environ)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert int(ended.stdout.split()[0]) >= 1
