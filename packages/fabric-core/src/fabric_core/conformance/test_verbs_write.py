"""Single writes (C5: sharding is exact; C4: one count per write)."""

from __future__ import annotations

import itertools

import pytest

from fabric_core import TransferEngine
from fabric_core.conformance.kit import GUARD, Calls, Engines, Kit, Memory, Pair, eventually, finish, pattern
from fabric_core.conformance.remote import Remotes

LENGTHS = [0, 1, 3, 64, 4095, 4096, 4097, 16_385, 65_537, (1 << 20) + 13]


def surrounded(data: bytes, offset: int, nbytes: int) -> bytes:
    """What a guarded buffer holds after `data` went to `offset`."""
    return GUARD * offset + data + GUARD * (nbytes - offset - len(data))


@pytest.mark.parametrize("length", LENGTHS)
def test_a_write_with_an_immediate_delivers_its_bytes_and_nothing_else(wide: Pair, length: int) -> None:
    """C5, C4: every byte of any length over any number of NICs, and one count for all shards together."""
    source, target = Memory(wide.a, length + 16, pattern(1, length + 16)), Memory(wide.b, length + 64, GUARD)
    imm = wide.b.alloc_imm()
    arrived = wide.b.expect_imm_count(imm, 1)
    sent = wide.a.submit_single_write(length, imm, (source.handle, 7), (target.desc, 13))
    finish([arrived, sent])
    assert target.get() == surrounded(pattern(1, length + 16)[7 : 7 + length], 13, length + 64)
    assert wide.b.free_imm(imm) == 0


@pytest.mark.parametrize("length", LENGTHS)
def test_a_silent_write_delivers_its_bytes_and_nothing_else(wide: Pair, length: int) -> None:
    """C5: the same without an immediate."""
    source, target = Memory(wide.a, length + 16, pattern(2, length + 16)), Memory(wide.b, length + 64, GUARD)
    finish([wide.a.submit_single_write(length, None, (source.handle, 7), (target.desc, 13))])
    wanted = surrounded(pattern(2, length + 16)[7 : 7 + length], 13, length + 64)
    eventually(lambda: target.get() == wanted, "the bytes are there once the sender was told that they are")


def test_any_memory_reaches_any_memory_of_another_process(engines: Engines, remotes: Remotes, nics: int) -> None:
    """C5: memory of engine.empty() and of the heap, both ways, between processes."""
    length = 300_001
    engine, remote = engines.open(nics=nics), remotes.start(nics=nics)
    imm_here, imm_there = engine.alloc_imm(), remote.alloc_imm()
    for k, (mine, theirs) in enumerate(itertools.product([True, False], repeat=2)):
        source, target = Memory(engine, length, pattern(k, length), shared=mine), remote.memory(length, shared=theirs)
        arrived = remote.expect(imm_there, 1)
        finish([engine.submit_single_write(length, imm_there, (source.handle, 0), (target.desc, 0))])
        remote.ends_well(arrived)
        assert target.holds(pattern(k, length))

        back, origin = Memory(engine, length, shared=mine), remote.memory(length, seed=10 + k, shared=theirs)
        here = engine.expect_imm_count(imm_here, 1)
        there = remote.do("write", length=length, imm=imm_here, src=(origin.number, 0), dst=(back.blob, 0))
        remote.ends_well(there)
        finish([here])
        assert back.get() == pattern(10 + k, length)


@pytest.mark.parametrize(("mine", "theirs"), [(1, 4), (4, 1), (2, 3), (3, 2)])
def test_the_two_sides_may_have_different_numbers_of_nics(engines: Engines, kit: Kit, mine: int, theirs: int) -> None:
    """C4, C5: still one count per write, and every byte."""
    kit.needs_nics(max(mine, theirs))
    pair = engines.pair(mine, theirs)
    length, count = 16_385, 20
    source, target = Memory(pair.a, length * count, pattern(5, length * count)), Memory(pair.b, length * count)
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, count)
    finish(
        pair.a.submit_single_write(length, imm, (source.handle, k * length), (target.desc, k * length))
        for k in range(count)
    )
    finish([arrived])
    assert target.get() == source.get()
    assert pair.b.free_imm(imm) == 0


def test_a_write_can_be_pinned_to_each_nic(wide: Pair, nics: int) -> None:
    """C4, C5: with nic=k the write leaves by that NIC alone; it arrives whole and counts once."""
    length = 50_001

    def bytes_by_nic() -> list[int]:
        peers = wide.a.stats()["peers"]
        return [nic["bytes"] for nic in peers[str(wide.b.address)]["nics"]] if peers else [0] * nics

    source, target = Memory(wide.a, length * nics, pattern(6, length * nics)), Memory(wide.b, length * nics)
    imm = wide.b.alloc_imm()
    arrived = wide.b.expect_imm_count(imm, nics)
    finish(
        wide.a.submit_single_write(length, imm, (source.handle, k * length), (target.desc, k * length), nic=k)
        for k in range(nics)
    )
    finish([arrived])
    assert target.get() == source.get()
    assert wide.b.free_imm(imm) == 0
    for k in range(nics):
        before = bytes_by_nic()
        finish([wide.a.submit_single_write(length, None, (source.handle, 0), (target.desc, 0), nic=k)])
        assert bytes_by_nic() == [n + length * (nic == k) for nic, n in enumerate(before)]


def test_a_long_write_counts_once_however_many_pieces_it_needs(wide: Pair) -> None:
    """C4, C5: a NIC may have a limit; a write of many times that size is still one write."""
    length = (24 << 20) + 7
    source, target = Memory(wide.a, length, pattern(12, length)), Memory(wide.b, length)
    imm = wide.b.alloc_imm()
    right: list[bool] = []
    arrived = wide.b.expect_imm_count(imm, 1, lambda _end: right.append(target.get() == source.get()))
    finish([wide.a.submit_single_write(length, imm, (source.handle, 0), (target.desc, 0)), arrived])
    eventually(lambda: right == [True], "all bytes are there in the callback")
    assert wide.b.free_imm(imm) == 0


def test_an_engine_can_write_to_itself(engines: Engines, nics: int) -> None:
    """C5: a peer like any other."""
    engine = engines.open(nics=nics)
    source, target = Memory(engine, 70_000, pattern(7, 70_000)), Memory(engine, 70_000)
    imm = engine.alloc_imm()
    arrived = engine.expect_imm_count(imm, 1)
    finish([engine.submit_single_write(70_000, imm, (source.handle, 0), (target.desc, 0)), arrived])
    assert target.get() == source.get()


def test_many_writes_in_flight_all_arrive(wide: Pair, kit: Kit) -> None:
    """C2, C4, C5: nothing is assumed about the order in which they land."""
    count, length = kit.scaled(200, 1000, 20_000), 777
    source, target = Memory(wide.a, length * count, pattern(8, length * count)), Memory(wide.b, length * count)
    imm, calls = wide.b.alloc_imm(), Calls()
    arrived = wide.b.expect_imm_count(imm, count)
    transfers = [
        wide.a.submit_single_write(length, imm, (source.handle, k * length), (target.desc, k * length), calls)
        for k in range(count)
    ]
    finish([arrived, *transfers])
    assert target.get() == source.get()
    calls.wait(count)
    assert set(map(id, calls.firsts)) == set(map(id, transfers))
    assert wide.b.free_imm(imm) == 0


def test_overlapping_source_ranges_may_be_in_flight_together(pair: Pair) -> None:
    """C5: one source to many places."""
    source, target = Memory(pair.a, 4096, pattern(9, 4096)), Memory(pair.b, 4096 * 16)
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, 16)
    finish(pair.a.submit_single_write(4096, imm, (source.handle, 0), (target.desc, k * 4096)) for k in range(16))
    finish([arrived])
    assert target.get() == source.get() * 16


def test_the_same_bytes_can_be_written_again_and_again(pair: Pair, kit: Kit) -> None:
    """C10: each round sees its own payload, not an earlier one."""
    source, target = Memory(pair.a, 8192), Memory(pair.b, 8192)
    imm = pair.b.alloc_imm()
    for turn in range(kit.scaled(10, 50, 1000)):
        source.put(pattern(turn, 8192))
        arrived = pair.b.expect_imm_count(imm, 1)
        finish([pair.a.submit_single_write(8192, imm, (source.handle, 0), (target.desc, 0)), arrived])
        assert target.get() == pattern(turn, 8192), f"round {turn}"


@pytest.mark.big
def test_more_than_4_gib_move_in_one_write(engines: Engines) -> None:
    """C5: lengths are 64 bits. The memory is sparse: only marks at a few places are looked at."""
    length = (4 << 30) + 12_289
    pair = engines.pair(2, 2)
    source, target = Memory(pair.a, length, shared=False), Memory(pair.b, length)
    marks = [0, (2 << 30) - 3, (4 << 30) - 7, (4 << 30) + 1, length - 8]
    for mark in marks:
        source.put(pattern(mark, 8), mark)
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, 1, timeout=110)
    sent = pair.a.submit_single_write(length, imm, (source.handle, 0), (target.desc, 0), timeout=110)
    finish([sent, arrived], timeout=110)
    assert [target.get(mark, 8) for mark in marks] == [source.get(mark, 8) for mark in marks]


@pytest.mark.big
def test_a_short_write_reaches_an_offset_above_4_gib(engines: Engines) -> None:
    """C5: so are offsets, on both sides."""
    nbytes = (4 << 30) + 65_536
    pair = engines.pair(2, 2)
    source, target = Memory(pair.a, nbytes, shared=False), Memory(pair.b, nbytes, shared=False)
    source.put(pattern(10, 5000), (4 << 30) + 11)
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, 1)
    finish([pair.a.submit_single_write(5000, imm, (source.handle, (4 << 30) + 11), (target.desc, (4 << 30) + 77))])
    finish([arrived])
    assert target.get((4 << 30) + 77, 5000) == pattern(10, 5000)
    assert target.get(77, 5000) == bytes(5000)


def test_a_write_says_what_it_is(engine: TransferEngine) -> None:
    """C1: state, done and exception() agree before and after the end."""
    source, target = Memory(engine, 64, pattern(11, 64)), Memory(engine, 64)
    transfer = engine.submit_single_write(64, None, (source.handle, 0), (target.desc, 0))
    assert transfer.state in ("pending", "done")
    finish([transfer])
    assert (transfer.state, transfer.done, transfer.exception()) == ("done", True, None)
    transfer.wait(0)  # again, at once
    repr(transfer)
