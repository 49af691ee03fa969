"""Two engines over libfabric's sockets: what the kit does not ask, because other backends have no such thing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fabric_core import NetAddr, PeerLost, PeerRestarted, RemoteAccessError, TransferEngine
from fabric_core.conformance.kit import Calls, Memory, eventually, fails, finish, pattern


@pytest.fixture
def pair(tcp: str) -> Iterator[tuple[TransferEngine, TransferEngine]]:
    with TransferEngine.open("cpu", "efa") as a, TransferEngine.open("cpu", "efa") as b:
        yield a, b


def counters(engine: TransferEngine) -> dict[str, int]:
    from fabric_core.native_lib import ffi, lib, text

    out = ffi.new("fab_counter[]", 16)
    count = lib.fab_nic_counters(engine._core.pointer, 0, 0, out, 16)
    return {text(entry.name): entry.value for entry in out[0:count]}


def test_a_revoked_key_is_refused_by_name_and_counted(pair: tuple[TransferEngine, TransferEngine]) -> None:
    """C6, S7: the providers would drop such a write in silence and call it done."""
    a, b = pair
    source, gone = Memory(a, 64), Memory(b, 64)
    b.dereg_mr(gone.handle)
    for _ in range(2):
        error = fails(a.submit_single_write(64, None, (source.handle, 0), (gone.desc, 0)), RemoteAccessError, 10)
        assert error.code == "EKEYREVOKED"
    assert counters(b)["revoked"] == 2


def test_a_forged_descriptor_writes_nothing(pair: tuple[TransferEngine, TransferEngine]) -> None:
    """S6: the token of a descriptor is random; a guess is refused by the owner of the memory."""
    from fabric_core import MrDesc

    a, b = pair
    source, target = Memory(a, 64, pattern(1, 64)), Memory(b, 64)
    d = target.desc
    forged = MrDesc(d.addr, d.ptr, d.nbytes, d.access, [key ^ (1 << 40) for key in d.keys], d.bases)
    fails(a.submit_single_write(64, None, (source.handle, 0), (forged, 0)), RemoteAccessError, 10)
    assert target.get() == bytes(64)
    finish([a.submit_single_write(64, None, (source.handle, 0), (d, 0))])
    assert target.get() == pattern(1, 64)


def test_revoking_waits_for_the_writes_under_way(pair: tuple[TransferEngine, TransferEngine]) -> None:
    """C7: what a peer has given to its provider before it hears of the end lands before dereg_mr returns, or never."""
    a, b = pair
    length = 8 << 20
    source = Memory(a, length, pattern(2, 1 << 20) * 8)
    for _ in range(3):
        target = Memory(b, length)
        flying = [a.submit_single_write(length, None, (source.handle, 0), (target.desc, 0)) for _ in range(4)]
        b.dereg_mr(target.handle)
        target.put(bytes(length))
        for one in flying:
            try:
                one.wait(20)
            except RemoteAccessError:
                pass
        assert target.get() == bytes(length)


def test_an_incarnation_that_is_gone_is_named(pair: tuple[TransferEngine, TransferEngine]) -> None:
    """C11: somebody answers there, and it is not who was meant."""
    a, b = pair
    where, _, _inc = str(b.address).rpartition("#")
    stale = NetAddr.parse(f"{where}#123456789")
    fails(a.submit_send(stale, b"x", timeout=5), PeerRestarted, 6)
    calls = Calls()
    b.submit_recvs(64, 1, calls)
    finish([a.submit_send(b.address, b"x")])


def test_nobody_at_a_port_is_said_in_time(pair: tuple[TransferEngine, TransferEngine], tcp: str) -> None:
    """C11: within the connect timeout."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TransferEngine.open("cpu", "efa", connect_timeout=1.0) as engine:
        begin = time.monotonic()
        fails(engine.submit_send(NetAddr.parse(f"efa:{tcp}/127.0.0.1:{port}#1"), b"x", timeout=60), PeerLost, 50)
        assert time.monotonic() - begin < 30


@pytest.mark.parametrize(("mine", "theirs"), [("a" * 32, "b" * 32), ("a" * 32, None)])
def test_nobody_joins_without_the_secret(tcp: str, mine: str, theirs: str | None) -> None:
    """S1: another secret, or none, ends in EACCES, and the owner counts it."""
    with (
        TransferEngine.open("cpu", "efa", secret=mine) as owner,
        TransferEngine.open("cpu", "efa", secret=theirs, connect_timeout=1.0) as stranger,
    ):
        error = fails(stranger.submit_send(owner.address, b"let me in", timeout=10), Exception, 8)
        assert getattr(error, "code", "") == "EACCES", error
        assert counters(owner)["auth"] >= 1
    with TransferEngine.open("cpu", "efa", secret=mine) as a, TransferEngine.open("cpu", "efa", secret=mine) as b:
        calls = Calls()
        b.submit_recvs(64, 1, calls)
        finish([a.submit_send(b.address, b"hello")])


def test_garbage_on_the_port_hurts_nobody(pair: tuple[TransferEngine, TransferEngine]) -> None:
    """C12: bytes that are no protocol of ours or of the provider's."""
    a, b = pair
    host, _, port = b.address.domains[0].partition("/")[2].partition("#")[0].partition(":")
    for seed in range(20):
        with socket.create_connection((host, int(port)), timeout=5) as line:
            try:
                line.sendall(pattern(seed, 4096))
            except OSError:
                pass
    calls = Calls()
    b.submit_recvs(64, 1, calls)
    finish([a.submit_send(b.address, b"still there")])
    assert calls.wait() == [b"still there"]


def test_long_messages_go_in_fragments(pair: tuple[TransferEngine, TransferEngine]) -> None:
    """C5: every length around the border of a fragment, all in flight together."""
    a, b = pair
    calls = Calls()
    b.submit_recvs(65536, 4, calls)
    lengths = [0, 1, 8143, 8144, 8145, 16288, 16289, 65535, 65536]
    finish(a.submit_send(b.address, pattern(n, n)) for n in lengths)
    assert sorted(calls.wait(len(lengths)), key=len) == [pattern(n, n) for n in lengths]


def test_a_provider_that_hangs_lets_go_of_one_peer_alone(tcp: str) -> None:
    """C7, C8: decision 0006. A stopped peer's writes end at their deadline; those to another peer never notice."""
    serve = (
        "import sys; from fabric_core import TransferEngine\n"
        "e = TransferEngine.open('cpu', 'efa', heartbeat=60); m = e.empty(1 << 22); d = e.reg_mr(m)[1]\n"
        "print(d.to_bytes().hex(), flush=True); sys.stdin.read()"
    )
    from fabric_core import MrDesc

    peers = [
        subprocess.Popen([sys.executable, "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        descs = []
        for peer in peers:
            assert peer.stdout is not None
            descs.append(MrDesc.from_bytes(bytes.fromhex(peer.stdout.readline())))
        with TransferEngine.open("cpu", "efa", heartbeat=60) as engine:
            source = Memory(engine, 1 << 22)
            for desc in descs:
                finish([engine.submit_single_write(64, None, (source.handle, 0), (desc, 0))])
            os.kill(peers[0].pid, signal.SIGSTOP)
            stuck = [
                engine.submit_single_write(1 << 22, None, (source.handle, 0), (descs[0], 0), timeout=1)
                for _ in range(16)
            ]
            fine = [engine.submit_single_write(1 << 16, None, (source.handle, 0), (descs[1], 0)) for _ in range(50)]
            finish(fine)
            for one in stuck:
                eventually(lambda it=one: it.done, "a write to a stopped peer ends", timeout=15)  # type: ignore[misc]
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
            for pipe in (peer.stdin, peer.stdout):
                if pipe:
                    pipe.close()


def test_a_long_write_goes_in_pieces(pair: tuple[TransferEngine, TransferEngine]) -> None:
    """C5, C8: where the processor copies, a call that moves all of it would hold up every other peer."""
    a, b = pair
    length = (3 << 20) + 1
    source, target = Memory(a, length, pattern(5, length)), Memory(b, length)
    finish([a.submit_single_write(length, None, (source.handle, 0), (target.desc, 0))])
    assert target.get() == pattern(5, length)
    assert a.stats()["peers"][str(b.address)]["nics"][0]["ops"] == 4


def test_strict_demands_what_efa_demands(tcp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch is on: writes are cut at an odd limit, posted in random order, and arrive whole."""
    monkeypatch.setenv("FABRIC_EFA_STRICT", "3")
    with TransferEngine.open("cpu", "efa") as a, TransferEngine.open("cpu", "efa") as b:
        length = (3 << 20) + 5
        source, target = Memory(a, length, pattern(3, length)), Memory(b, length)
        imm = b.alloc_imm()
        arrived = b.expect_imm_count(imm, 1)
        finish([a.submit_single_write(length, imm, (source.handle, 0), (target.desc, 0)), arrived])
        assert target.get() == pattern(3, length)
        peer = a.stats()["peers"][str(b.address)]
        assert peer["nics"][0]["ops"] >= 4, "1,000,003 bytes at most at a time"


def test_registering_beside_traffic_does_not_starve(pair: tuple[TransferEngine, TransferEngine]) -> None:
    """C8: a thread that registers gets its turn while the worker polls without a pause."""
    a, b = pair
    source, target = Memory(a, 1 << 20), Memory(b, 1 << 20)
    stop = threading.Event()

    def traffic() -> None:
        while not stop.is_set():
            finish([a.submit_single_write(1 << 20, None, (source.handle, 0), (target.desc, 0)) for _ in range(8)])

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        begin = time.monotonic()
        for _ in range(50):
            handle, _ = a.reg_mr(bytearray(4096))
            a.dereg_mr(handle)
        assert time.monotonic() - begin < 100
    finally:
        stop.set()
        thread.join()


IDLE = """
import os, time
from fabric_core import TransferEngine
a, b = TransferEngine.open("cpu", "efa"), TransferEngine.open("cpu", "efa")
b.submit_recvs(64, 2, lambda message: None)
a.submit_send(b.address, b"x").wait(10)
begin = time.monotonic()
while time.monotonic() < begin + 1:  # until the pauses have grown
    time.sleep(0.1)
before, begin = sum(os.times()[:2]), time.monotonic()
while time.monotonic() < begin + 2:
    time.sleep(0.5)
print((sum(os.times()[:2]) - before) / (time.monotonic() - begin))
"""


def test_an_idle_engine_burns_no_processor(tcp: str) -> None:
    """Two of them, with a link between: less than a twentieth of a core, whatever the provider's descriptor says."""
    ended = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, timeout=60, check=True)
    assert float(ended.stdout) < 0.05


def test_the_process_ends_well_with_an_engine_left_open(tcp: str, tmp_path: Path) -> None:
    """R9: no crash in a provider's thread or destructor at exit."""
    script = (
        "from fabric_core import TransferEngine\n"
        "a = TransferEngine.open('cpu', 'efa'); b = TransferEngine.open('cpu', 'efa'); got = []\n"
        "b.submit_recvs(64, 2, got.append); a.submit_send(b.address, b'x').wait(10)"
    )
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, b"")


def test_two_processes_share_memory_over_shm(
    unusable: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """C5, C10: a write with an immediate, and a message, between processes: within one, shm crashes (docs/efa.md)."""
    if reason := unusable("shm", ""):
        pytest.skip(reason)
    monkeypatch.setenv("FABRIC_EFA_PROVIDER", "shm")
    here = (
        "import sys; from fabric_core import TransferEngine; from fabric_core.bootstrap import open_board\n"
        "e = TransferEngine.open('cpu', 'efa'); m = e.empty(1 << 20); d = e.reg_mr(m)[1]; imm = e.alloc_imm()\n"
        "arrived = e.expect_imm_count(imm, 1, timeout=60); got = []; e.submit_recvs(64, 2, got.append)\n"
        "open_board(sys.argv[1]).publish('x', f'{d.to_bytes().hex()} {imm}'); arrived.wait(60)\n"
        "assert bytes(m) == bytes(range(256)) * 4096; sys.stdin.read(); print(got, flush=True)"
    )
    there = (
        "import sys; from fabric_core import MrDesc, TransferEngine; from fabric_core.bootstrap import open_board\n"
        "text, imm = open_board(sys.argv[1]).lookup('x', 60).split(); desc = MrDesc.from_bytes(bytes.fromhex(text))\n"
        "e = TransferEngine.open('cpu', 'efa'); h, _ = e.reg_mr(bytearray(bytes(range(256)) * 4096))\n"
        "e.submit_single_write(0, None, (h, 0), (desc, 0), timeout=30).wait(60)\n"  # 1.17 confirms no such delivery
        "e.submit_single_write(1 << 20, int(imm), (h, 0), (desc, 0), timeout=30).wait(60)\n"
        "e.submit_send(desc.addr, b'done', timeout=30).wait(60)"
    )
    board = f"file:{tmp_path}"
    words = [sys.executable, "-c", here, board]
    receiver = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        subprocess.run([sys.executable, "-c", there, board], check=True, timeout=100)
        out, _ = receiver.communicate("", timeout=60)
        assert (out.strip(), receiver.returncode) == ("[b'done']", 0)
    finally:
        receiver.kill()
        receiver.wait()
