"""fabric-ibverbs on real queue pairs: bad weather, lost NICs and peers, strangers, and bursts.

Needs software RDMA devices as tools/rdma-guest makes them (`make test-verbs`); skipped elsewhere. Sizes suit an
emulated machine, where one small write takes 50 us at best.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verbs_rig import (
    DEADLINE,
    addressless,
    connect,
    devices,
    eventually,
    grown,
    hardware,
    need,
    netem,
    open_on,
    pattern,
    refused,
    unplugged,
)

from fabric_core import (
    DeadlineExceeded,
    FabricError,
    NetAddr,
    NicLost,
    Pages,
    PeerLost,
    RemoteAccessError,
    TransferEngine,
    TransferError,
)
from fabric_core.conformance.kit import Calls, Memory

pytestmark = [pytest.mark.nic, pytest.mark.slow, pytest.mark.timeout(400)]

PEER = Path(__file__).with_name("verbs_peer.py")
IMMEDIATES = int(os.environ.get("VERBS_IMMEDIATES", "10000"))


@pytest.fixture(autouse=True)
def _devices() -> None:
    need(2)


def rounds(a: TransferEngine, b: TransferEngine, count: int, pages: int, size: int) -> int:
    """Pages with an immediate each; every round's bytes are compared inside the callback of its last immediate (R2).
    Returns how many immediates were seen."""
    imm, wrong = b.alloc_imm(), Calls()
    target = Memory(b, pages * size)
    source = Memory(a, pages * size)
    indices = list(range(pages))
    for turn in range(count):
        content = pattern(turn, pages * size)
        source.put(content)
        seen = Calls()

        def look(_done: object, content: bytes = content, seen: Calls = seen) -> None:
            if target.get() != content:
                wrong(1)
            seen(1)

        arrived = b.expect_imm_count(imm, pages, look)
        sent = a.submit_paged_writes(
            size, imm, (source.handle, Pages(indices, size)), (target.desc, Pages(indices, size))
        )
        sent.wait(DEADLINE)
        arrived.wait(DEADLINE)
        seen.wait(timeout=DEADLINE)
        assert b.imm_count(imm) == 0, "an immediate came twice"
    assert b.free_imm(imm) == 0
    assert wrong.count == 0, f"{wrong.count} of {count} rounds were told before their bytes were there"
    return count * pages


# ---- weather ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weather",
    [
        ("loss", "1%"),
        ("delay", "1ms", "reorder", "25%"),
        ("delay", "5ms", "2ms"),
        ("duplicate", "2%"),
        ("corrupt", "1%"),
    ],
    ids=lambda words: words[0] if len(words) < 4 else "reorder",
)
def test_bad_weather_costs_time_and_nothing_else(pair: tuple[TransferEngine, TransferEngine], weather: Any) -> None:
    """R1, R2, C10: loss, reordering, delay, duplicates, corruption: each immediate once, after its bytes."""
    a, b = pair
    connect(a, b)
    with netem("rxe0", *weather), netem("rxe1", *weather):
        rounds(a, b, 4, 250, 512)


@pytest.mark.timeout(400 + IMMEDIATES // 50)
def test_a_hundred_thousand_immediates_under_loss_and_reordering(
    pair: tuple[TransferEngine, TransferEngine],
) -> None:
    """R1: none early, lost or doubled. VERBS_IMMEDIATES sets another number (the suite's default is smaller)."""
    a, b = pair
    connect(a, b)
    before, before_b = hardware("rxe0"), hardware("rxe1")
    with netem("rxe0", "delay", "100us", "reorder", "10%", "loss", "1%"):
        assert rounds(a, b, IMMEDIATES // 250, 250, 64) == IMMEDIATES
    moved = grown("rxe0", before), grown("rxe1", before_b)
    print(f"{IMMEDIATES} immediates; rxe0 {moved[0]}, rxe1 {moved[1]}, {refused(a)}")
    assert moved[1].get("out_of_seq_request", 0) > 0, f"there was no bad weather: {moved}"


def test_first_contact_gets_through_heavy_loss(opened: list[TransferEngine]) -> None:
    """C11: handshakes are resent with a back-off, and bounded."""
    opened += [open_on("rxe0", connect_timeout=40), open_on("rxe1", connect_timeout=40)]
    with netem("rxe0", "loss", "25%"), netem("rxe1", "loss", "25%"):
        connect(*opened)


def test_nobody_there_ends_at_the_connect_timeout(opened: list[TransferEngine]) -> None:
    """C11, R3: an address where nobody answers is an error in bounded time."""
    opened.append(open_on("rxe0", connect_timeout=2))
    gone = open_on("rxe1")
    address = gone.address
    gone.close()
    with pytest.raises(TransferError) as caught:
        opened[0].submit_send(address, b"hello?").wait(DEADLINE)
    assert not isinstance(caught.value, DeadlineExceeded), "that was the operation's own deadline"


# ---- bursts ----------------------------------------------------------------------------------------------------------


def test_a_burst_from_four_peers_meets_no_empty_queue(opened: list[TransferEngine]) -> None:
    """No receiver-not-ready: immediates are bounded by credit, so the shared receive queue never runs empty."""
    names = devices()
    receiver = open_on("rxe0")
    senders = [open_on(names[1 + k % (len(names) - 1)]) for k in range(4)]
    opened += [receiver, *senders]
    each = int(os.environ.get("VERBS_BURST", "10000")) // 4
    target, imm = Memory(receiver, 4096), receiver.alloc_imm()
    sources = [connect(sender, receiver)[0] for sender in senders]
    before = hardware("rxe0")
    arrived = receiver.expect_imm_count(imm, 4 * each, timeout=DEADLINE)
    zero = [0] * each
    writes = [
        sender.submit_paged_writes(8, imm, (source.handle, Pages(zero, 0)), (target.desc, Pages(zero, 0)))
        for sender, source in zip(senders, sources, strict=True)
    ]
    for write in writes:
        write.wait(DEADLINE)
    arrived.wait(DEADLINE)
    assert receiver.free_imm(imm) == 0
    moved = grown("rxe0", before)
    assert not {name: value for name, value in moved.items() if "rnr" in name}, moved
    assert refused(receiver)["credits"] > 0, "the test was too small to need any credit"


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_revoked_key_fails_alone_and_the_queue_pair_is_mended(
    pair: tuple[TransferEngine, TransferEngine],
) -> None:
    """C1, C4, peers.md 4: one bad key does not end the traffic between two NICs; what was behind it arrives once."""
    a, b = pair
    source, target = connect(a, b)
    imm = b.alloc_imm()
    for turn in range(3):
        gone = Memory(b, 4096)
        b.dereg_mr(gone.handle)
        arrived = b.expect_imm_count(imm, 30)
        writes = []
        for k in range(31):
            bad = k == 10
            where = (gone.desc if bad else target.desc, 0)
            writes.append((bad, a.submit_single_write(4096, None if bad else imm, (source.handle, 0), where)))
        for bad, write in writes:
            if bad:
                with pytest.raises(RemoteAccessError):
                    write.wait(DEADLINE)
            else:
                write.wait(DEADLINE)
        arrived.wait(DEADLINE)
        assert refused(a)["mended"] == turn + 1
    assert b.free_imm(imm) == 0
    assert refused(a)["revoked"] == 3


def test_another_secret_is_refused(opened: list[TransferEngine]) -> None:
    """S1: no handshake without the job's secret; it is counted, and named at the sender."""
    opened += [
        open_on("rxe0", secret="0123456789abcdef0123", connect_timeout=3),
        open_on("rxe1", secret="another secret of the job", connect_timeout=3),
    ]
    a, b = opened
    with pytest.raises(TransferError) as caught:
        a.submit_send(b.address, b"let me in").wait(DEADLINE)
    assert caught.value.code in ("EACCES", "ETIMEDOUT")
    assert refused(b)["auth"] > 0


def test_garbage_datagrams_are_counted_and_hurt_nobody(pair: tuple[TransferEngine, TransferEngine]) -> None:
    """C12, S8, S9: any bytes at the datagram queue pair; first contact and traffic go on."""
    from fabric_core.config import Settings
    from fabric_core.domain import GroupConfig, NativeDomain
    from fabric_ibverbs import backend, library
    from fabric_ibverbs.options import Options

    a, b = pair
    ffi, lib = library.load(Options())
    os.environ["FABRIC_VERBS_NICS"] = "rxe0"
    try:
        (stranger,) = backend.open_group(GroupConfig("cpu", "stranger", 1, Settings()))
    finally:
        del os.environ["FABRIC_VERBS_NICS"]
    assert isinstance(stranger, NativeDomain)
    ctx, where = ffi.cast("void *", stranger.ctx), b.address.domains[0].encode()
    magic = (0x31424656).to_bytes(4, "little")
    try:
        for k in range(200):
            junk = pattern(k, 1 + 37 * k % 900)
            if k % 4 == 1:  # our prefix, nonsense behind it
                junk = magic + (len(junk)).to_bytes(4, "little") + bytes(28) + junk
            assert lib.fab_verbs_inject(ctx, where, junk[:984], len(junk[:984])) == 0
    finally:
        lib.fab_verbs_close(ctx)
    eventually(lambda: refused(b)["malformed"] > 0, "garbage is counted")
    connect(a, b)


# ---- a process that forks -------------------------------------------------------------------------------------------


def test_a_fork_leaves_registered_memory_with_the_parent(pair: tuple[TransferEngine, TransferEngine]) -> None:
    """R7: pages that a NIC holds stay the parent's, also when it writes to them first (copy on write)."""
    a, b = pair
    connect(a, b)
    source = Memory(a, 65536, pattern(1, 65536), shared=False)
    target = Memory(b, 65536, shared=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: there are threads; the child only waits
        child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        source.put(pattern(2, 65536))
        target.put(bytes(65536))
        imm = b.alloc_imm()
        arrived = b.expect_imm_count(imm, 1)
        a.submit_single_write(65536, imm, (source.handle, 0), (target.desc, 0)).wait(DEADLINE)
        arrived.wait(DEADLINE)
        assert target.get() == pattern(2, 65536)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# ---- peers and NICs that are lost ------------------------------------------------------------------------------------


class Peer:
    """`verbs_peer.py` in a process of its own: an engine with one region and one pool of receives."""

    def __init__(self, device: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), device], stdout=subprocess.PIPE, stdin=subprocess.PIPE
        )
        assert self.process.stdout
        self.address = NetAddr.parse(self.process.stdout.readline().decode().strip())

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
        self.process.kill()
        self.process.wait(DEADLINE)
        for pipe in (self.process.stdout, self.process.stdin):
            if pipe:
                pipe.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    one = Peer("rxe1")
    yield one
    one.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_a_peer_that_dies_or_stands_still_is_lost_by_name(
    opened: list[TransferEngine], peer: Peer, number: signal.Signals
) -> None:
    """R5, C11: in flight ends with PeerLost that names it, before the operations' own deadline; another peer is not
    disturbed."""
    opened += [open_on("rxe0", heartbeat=1), open_on("rxe1", heartbeat=1)]
    a, b = opened
    connect(a, b)
    sent = [a.submit_send(peer.address, b"x", timeout=60) for _ in range(3)]
    for one in sent:
        one.wait(DEADLINE)
    stuck = [a.submit_send(peer.address, b"nobody receives any more", timeout=60) for _ in range(10)]
    os.kill(peer.process.pid, number)
    for one in stuck:
        with pytest.raises(PeerLost) as caught:
            one.wait(DEADLINE)
        assert str(peer.address) in str(caught.value)
    connect(a, b)


def test_a_cable_pulled_in_mid_transfer_leaves_its_work_to_the_other(opened: list[TransferEngine]) -> None:
    """R8: one NIC of two dies: the other does what is submitted then; what was on it says so; then it returns."""
    need(4)
    opened += [open_on("rxe0", "rxe1", heartbeat=1), open_on("rxe2", "rxe3", heartbeat=1)]
    a, b = opened
    size = 4 << 20
    source, target = Memory(a, size, pattern(3, size)), Memory(b, size)
    a.submit_single_write(size, None, (source.handle, 0), (target.desc, 0)).wait(DEADLINE)
    flying = [a.submit_single_write(size, None, (source.handle, 0), (target.desc, 0)) for _ in range(6)]
    with unplugged("rxe1"):
        eventually(lambda: refused(a)["events"] > 0, "the device tells that its port went down")
        ends = []
        for write in flying:
            try:
                write.wait(DEADLINE)
                ends.append("done")
            except FabricError as error:
                ends.append(type(error).__name__)
        assert all(end in ("done", "NicLost", "PeerLost", "TransferError") for end in ends), ends
        target.put(bytes(size))
        imm = b.alloc_imm()
        arrived = b.expect_imm_count(imm, 1)
        a.submit_single_write(size, imm, (source.handle, 0), (target.desc, 0)).wait(DEADLINE)
        arrived.wait(DEADLINE)
        assert target.get() == pattern(3, size)
    with pytest.raises(FabricError):
        a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), nic=7)

    def back() -> bool:
        try:
            a.submit_single_write(64, None, (source.handle, 0), (target.desc, 0), nic=1).wait(DEADLINE)
        except TransferError:
            return False
        return True

    eventually(back, "the second NIC is used again")


def test_an_address_that_is_taken_away_is_a_lost_nic(opened: list[TransferEngine]) -> None:
    """R8: the port is up, but nobody can reach it: the device's event says so, and work fails by name."""
    opened += [open_on("rxe0", heartbeat=1), open_on("rxe1", heartbeat=1)]
    a, b = opened
    told = Calls()
    b.on_error = told
    connect(b, a)
    with addressless("rxe1"):
        eventually(lambda: any(isinstance(error, NicLost) for error in told.firsts), "the engine names its lost NIC")
        with pytest.raises(TransferError):
            b.submit_send(a.address, b"from nowhere", timeout=30).wait(DEADLINE)
