"""What a domain does and leaves undone while it is polled: how much it gives the provider, and what it listens to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from fabric_core import MrDesc, TransferEngine
from fabric_core.conformance.kit import eventually, finish

STOPS = """
import sys
from fabric_core import TransferEngine
e = TransferEngine.open("cpu", "efa", heartbeat=30)
m = e.empty(32 << 20)
print(e.reg_mr(m)[1].to_bytes().hex(), flush=True)
sys.stdin.read()
print(bytes(m) == bytes(range(256)) * (32 << 12), flush=True)
"""


def test_only_so_much_of_a_long_write_is_in_flight(tcp: str) -> None:
    """C8: what has come to a receiver it may have to copy in one call, in which nobody else of its process gets on."""
    words = [sys.executable, "-c", STOPS]
    with (
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as far,
        TransferEngine.open("cpu", "efa", heartbeat=30) as engine,
    ):
        try:
            assert far.stdout is not None
            desc = MrDesc.from_bytes(bytes.fromhex(far.stdout.readline()))
            length = 32 << 20
            handle, _ = engine.reg_mr(bytearray(bytes(range(256)) * (length >> 8)))
            finish([engine.submit_single_write(1, None, (handle, 0), (desc, 0))])  # it is connected, and has the key

            def taken() -> int:
                return int(engine.stats()["peers"][str(desc.addr)]["nics"][0]["ops"])

            before = taken()
            far.send_signal(signal.SIGSTOP)
            os.waitpid(far.pid, os.WUNTRACED)  # all its threads stand still: else one may take the first piece
            transfer = engine.submit_single_write(length, None, (handle, 0), (desc, 0), timeout=60)
            eventually(lambda: taken() == before + 8, "eight pieces are given to the provider")
            for _ in range(1000):
                engine.progress()
            assert taken() == before + 8
            far.send_signal(signal.SIGCONT)
            finish([transfer])
            assert taken() >= before + 32
            assert far.communicate("", timeout=60)[0].strip() == "True"
        finally:
            far.kill()


def nested_sets() -> int:
    """How many epoll sets of this process hold another one: ours the provider's, while it is listened to."""
    found = 0
    for entry in Path("/proc/self/fdinfo").iterdir():
        try:
            watched = re.findall(r"^tfd:\s*(\d+)", entry.read_text(), re.MULTILINE)
            found += any(os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventpoll]" for fd in watched)
        except OSError:
            continue  # closed meanwhile
    return found


def test_the_provider_is_listened_to_only_while_nobody_polls(tcp: str) -> None:
    """C8: what is in a set costs each packet a call through it; what is not in it wakes nobody who sleeps."""
    before = nested_sets()
    with TransferEngine.open("cpu", "efa") as engine:
        listening = nested_sets()
        assert listening > before
        deadline = time.monotonic() + 20
        while nested_sets() != listening - 1:
            engine.progress()
            assert time.monotonic() < deadline, "polled, and still listened to"
        while nested_sets() != listening:
            assert time.monotonic() < deadline, "nobody polls, and nothing can wake the worker"
            time.sleep(0.001)
