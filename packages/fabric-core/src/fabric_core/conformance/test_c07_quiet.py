"""C7: after the end of an operation, good or bad, no NIC reads its source or writes its target."""

from __future__ import annotations

import time

import pytest

from fabric_core import DeadlineExceeded, StaleHandle, TransferError
from fabric_core.conformance.kit import Calls, Engines, Kit, Memory, Pair, after, eventually, finish, pattern, settle
from fabric_core.conformance.remote import Remote

SIZE = 4 << 20


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_the_source_is_ours_again_after_a_failure(engines: Engines, remote: Remote, how: str) -> None:
    """C7: a peer stands still in the middle of many writes. What they leave at it never comes from what we put into
    the source after they ended."""
    engine = engines.open(heartbeat=60)  # only the operations' own deadline is of interest here
    source, target = Memory(engine, SIZE, pattern(1, SIZE)), remote.memory(4 * SIZE)
    finish([engine.submit_single_write(1, None, (source.handle, 0), (target.desc, 0))])
    remote.stop()
    writes = [
        engine.submit_single_write(SIZE, None, (source.handle, 0), (target.desc, k * SIZE), timeout=1.0)
        for k in range(4)
    ]
    if how == "cancel":
        for write in writes:
            write.cancel()
    states = settle(writes, timeout=20)
    source.put(b"\xee" * SIZE)
    remote.cont()
    mark = Memory(engine, 64)
    imm = remote.alloc_imm()
    arrived = remote.expect(imm, 1)
    try:
        engine.submit_single_write(0, imm, (mark.handle, 0), (target.desc, 0)).wait(20)
        remote.ends_well(arrived)
    except TransferError:
        pass  # the peer was given up meanwhile: then nothing more can come
    for k, state in enumerate(states):
        landed = target.get(k * SIZE, SIZE)
        if state == "done":
            assert landed == pattern(1, SIZE), f"write {k} was done and its bytes are wrong"
        else:
            strange = [i for i in range(0, SIZE, 509) if landed[i] not in (0, pattern(1, SIZE)[i])]
            assert not strange, (
                f"write {k} ({state}) carried bytes put into the source after its end, e.g. at {strange[0]}"
            )


def test_the_source_may_be_unregistered_and_changed_right_after_the_end(pair: Pair, kit: Kit) -> None:
    """C7: also for the callback of a write that went well."""
    target = Memory(pair.b, 1 << 16)
    for turn in range(kit.scaled(10, 50, 500)):
        source = Memory(pair.a, 1 << 16, pattern(turn, 1 << 16))
        imm = pair.b.alloc_imm()
        arrived = pair.b.expect_imm_count(imm, 1)
        finish([pair.a.submit_single_write(1 << 16, imm, (source.handle, 0), (target.desc, 0))])
        source.put(b"\xee" * (1 << 16))
        pair.a.dereg_mr(source.handle)
        finish([arrived])
        assert target.get() == pattern(turn, 1 << 16)
        pair.b.free_imm(imm)


def test_unregistering_waits_for_the_writes_that_read_the_region(pair: Pair) -> None:
    """C7: dereg_mr returns when no transfer uses the region any more, or says that some still do."""
    calls, length = Calls(), 1 << 20
    source, target = Memory(pair.a, length, pattern(2, length)), Memory(pair.b, length)
    writes = [pair.a.submit_single_write(length, None, (source.handle, 0), (target.desc, 0), calls) for _ in range(16)]
    pair.a.dereg_mr(source.handle, 20)
    assert all(write.done for write in writes)
    with pytest.raises(StaleHandle):
        pair.a.submit_single_write(1, None, (source.handle, 0), (target.desc, 0))
    calls.wait(16)


def test_an_operation_that_met_its_deadline_leaves_no_trace_at_the_receiver(pair: Pair) -> None:
    """C7, C3: a message that timed out before a buffer was posted is not delivered later."""
    late = pair.a.submit_send(pair.b.address, b"too late", timeout=0.2)
    with pytest.raises(DeadlineExceeded):
        late.wait(20)
    calls = Calls()
    pair.b.submit_recvs(64, 2, calls)
    finish([pair.a.submit_send(pair.b.address, b"in time")])
    calls.wait(1)
    pair.b.close()
    assert calls.firsts == [b"in time"]


def test_after_close_nothing_moves(engines: Engines, kit: Kit) -> None:
    """C7: close() of the receiver ends the writing into its memory, close() of the sender the reading."""
    for closes in ("sender", "receiver"):
        pair = engines.pair()
        source, target = Memory(pair.a, SIZE, pattern(3, SIZE)), Memory(pair.b, SIZE)
        writes = [pair.a.submit_single_write(SIZE, None, (source.handle, 0), (target.desc, 0)) for _ in range(8)]
        (pair.a if closes == "sender" else pair.b).close()
        if closes == "sender":
            source.put(b"\xee" * SIZE)
            finish([pair.b.submit_barrier(None, None, pair.b.alloc_imm(), [target.desc])])
            assert b"\xee" * 64 not in target.get(), "the source was read after its engine was closed"
        else:
            target.put(bytes(SIZE))
            settle(writes)
            assert target.get() == bytes(SIZE), "memory was written after its engine was closed"


def test_ends_are_not_reported_early(pair: Pair, kit: Kit) -> None:
    """C7: a write whose source is changed in its own callback has taken the bytes by then."""
    count, length = kit.scaled(20, 64, 500), 50_000
    target = Memory(pair.b, count * length)
    sources = [Memory(pair.a, length, pattern(k, length)) for k in range(count)]
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, count)
    begin = time.monotonic()
    for k, source in enumerate(sources):
        pair.a.submit_single_write(
            length, imm, (source.handle, 0), (target.desc, k * length), after(source.put, b"\xee" * length)
        )
    finish([arrived])
    eventually(lambda: all(source.get(0, 1) == b"\xee" for source in sources), "every callback ran")
    assert time.monotonic() - begin < 60
    assert target.get() == b"".join(pattern(k, length) for k in range(count))
