"""What a provider's errors become: one operation that fails alone, or a peer that is gone; and the provider's words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from fabric_core import MrDesc, NetAddr, PeerLost, Transfer, TransferEngine, TransferError
from fabric_efa import library

#: An engine that holds memory of both kinds, and takes away what lies behind a registration when it is told to.
FAR = """
import ctypes, mmap, os, sys
from fabric_core import TransferEngine
e = TransferEngine.open("cpu", "efa")
kept, gone = e.empty(1 << 20), mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(gone))
print(*(e.reg_mr(memory)[1].to_bytes().hex() for memory in (kept, gone)), flush=True)
libc = ctypes.CDLL(None)
for line in sys.stdin:
    print(libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(1 << 20)), flush=True)
os._exit(0)
"""


class Far:
    """The other process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FAR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.kept, self.gone = (MrDesc.from_bytes(bytes.fromhex(word)) for word in self.line().split())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def unmap(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("unmap\n")
        assert self.line() == "0\n"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()


@pytest.fixture
def start() -> Iterator[Callable[[], Far]]:
    started: list[Far] = []

    def one() -> Far:
        started.append(Far())
        return started[-1]

    yield one
    for far in started:
        far.close()


def error_of(transfer: Transfer) -> TransferError:
    with pytest.raises(TransferError) as caught:
        transfer.wait(30)
    return caught.value


def test_one_failed_operation_fails_alone(
    start: Callable[[], Far], unusable: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8: over shm, where an error is one operation's. Its neighbours to the same peer arrive, before and after it."""
    if reason := unusable("shm", ""):
        pytest.skip(reason)
    monkeypatch.setenv("FABRIC_EFA_PROVIDER", "shm")
    far = start()
    length = 1 << 18  # copied by the kernel, which says that nothing is there; short ones the receiver copies itself
    with TransferEngine.open("cpu", "efa") as engine:
        handle, _ = engine.reg_mr(engine.empty(length))

        def write(desc: MrDesc) -> Transfer:
            return engine.submit_single_write(length, None, (handle, 0), (desc, 0), timeout=30)

        write(far.gone).wait(30)
        far.unmap()
        good = [write(far.kept)]
        bad = write(far.gone)
        good += [write(far.kept)]
        error = error_of(bad)
        for one in good:
            one.wait(30)
        write(far.kept).wait(30)
        assert error.code == "EIO"
        assert "the provider shm: " in str(error)
        assert error.nic is not None
        assert library.words(error.nic, error.peer or "", -5) in str(error)


def test_a_killed_peer_is_lost_and_its_successor_is_another(start: Callable[[], Far], tcp: str) -> None:
    """C11: writes to it end as PeerLost, and one that is started anew is reached by its own descriptor at once."""
    far = start()
    with TransferEngine.open("cpu", "efa", heartbeat=1.0) as engine:
        handle, _ = engine.reg_mr(engine.empty(1 << 20))
        engine.submit_single_write(64, None, (handle, 0), (far.kept, 0), timeout=30).wait(30)
        os.kill(far.process.pid, signal.SIGSTOP)  # so that they are under way when it dies
        flying = [engine.submit_single_write(1 << 20, None, (handle, 0), (far.kept, 0), timeout=30) for _ in range(32)]
        os.kill(far.process.pid, signal.SIGKILL)
        assert {type(error_of(one)) for one in flying} == {PeerLost}
        again = start()
        assert str(again.kept.addr) != str(far.kept.addr)
        engine.submit_single_write(1 << 20, None, (handle, 0), (again.kept, 0), timeout=30).wait(30)


def test_nothing_wakes_a_thread_beside_one_that_polls(start: Callable[[], Far], tcp: str) -> None:
    """C8: neither traffic nor the contact's timer: a worker that finds our descriptor readable never sleeps."""
    far = start()
    with TransferEngine.open("cpu", "efa", heartbeat=0.2) as engine:
        handle, _ = engine.reg_mr(engine.empty(65536))
        engine.submit_single_write(65536, None, (handle, 0), (far.kept, 0), timeout=30).wait(30)
        sleeps, begin = engine.stats()["sleeps"], time.monotonic()
        while (took := time.monotonic() - begin) < 1:
            one = engine.submit_single_write(65536, None, (handle, 0), (far.kept, 0), timeout=30)
            while not one.done:
                pass
        assert engine.stats()["sleeps"] - sleeps < 3 * took / 0.001, "one look in a millisecond is its due"


@pytest.mark.parametrize(
    ("domain", "code", "words"),
    [
        ("shm/6661#1f", "EPROTONOSUPPORT", "this engine is on provider {own}, that address is of shm: --provider or"),
        ("{own}/999.0.0.1:4#1f", "EINVAL", "that is no address of provider {own}, which look like {own}/"),
    ],
)
def test_an_address_that_this_provider_cannot_take_is_explained(tcp: str, domain: str, code: str, words: str) -> None:
    with TransferEngine.open("cpu", "efa") as engine:
        own = engine.address.domains[0].partition("/")[0]
        address = "efa:" + domain.format(own=own)
        error = error_of(engine.submit_send(NetAddr.parse(address), b"x", timeout=30))
        assert error.code == code
        assert words.format(own=own) in str(error)
        assert address in str(error)


def test_words_of_nobody_are_none(tcp: str) -> None:
    assert library.words("no such NIC") == ""
