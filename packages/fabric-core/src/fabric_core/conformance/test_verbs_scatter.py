"""Scatters and barriers over peer groups (C4: one count per target, C5)."""

from __future__ import annotations

import pytest

from fabric_core import ScatterDst, TransferEngine
from fabric_core.conformance.kit import GUARD, Calls, Engines, Kit, Memory, Pair, common_imm, finish, pattern
from fabric_core.conformance.remote import Remote


def test_a_scatter_gives_each_peer_its_part(engines: Engines, nics: int) -> None:
    """C4, C5: different lengths, odd offsets, one count for each target."""
    lengths = [1, 4096, 16_385, 70_003]
    a, peers = engines.open(nics=nics), [engines.open(nics=nics) for _ in lengths]
    source = Memory(a, sum(lengths) + 3, pattern(1, sum(lengths) + 3))
    targets = [Memory(peer, length + 20, GUARD) for peer, length in zip(peers, lengths, strict=True)]
    imm = common_imm(*peers)
    arrived = [peer.expect_imm_count(imm, 1) for peer in peers]
    group, parts, at = a.add_peer_group([peer.address for peer in peers]), [], 3
    for target, length in zip(targets, lengths, strict=True):
        parts.append(ScatterDst(target.desc, length, at, 9))
        at += length
    calls = Calls()
    sent = a.submit_scatter(group, calls, imm, source.handle, parts)
    finish([sent, *arrived])
    for target, part in zip(targets, parts, strict=True):
        payload = source.get(part.src_offset, part.length)
        assert target.get() == GUARD * 9 + payload + GUARD * 11
    assert [peer.free_imm(imm) for peer in peers] == [0] * len(peers)
    assert calls.wait() == [sent]


def test_a_scatter_needs_no_group(pair: Pair) -> None:
    """C5: descriptors know their peers."""
    source, target = Memory(pair.a, 5000, pattern(2, 5000)), Memory(pair.b, 5000)
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, 2)
    parts = [ScatterDst(target.desc, 2000, 0, 3000), ScatterDst(target.desc, 3000, 2000, 0)]
    finish([pair.a.submit_scatter(None, None, imm, source.handle, parts), arrived])
    assert target.get() == source.get(2000, 3000) + source.get(0, 2000)
    assert pair.b.free_imm(imm) == 0


def test_a_peer_may_be_in_a_scatter_twice_and_so_may_we(wide: Pair) -> None:
    """C4: a duplicate in the group is two targets, and an engine may be its own peer."""
    source = Memory(wide.a, 3000, pattern(3, 3000))
    theirs, ours = Memory(wide.b, 2000), Memory(wide.a, 1000)
    imm = common_imm(wide.a, wide.b)
    arrived = [wide.b.expect_imm_count(imm, 2), wide.a.expect_imm_count(imm, 1)]
    group = wide.a.add_peer_group([wide.b.address, wide.b.address, wide.a.address])
    parts = [
        ScatterDst(theirs.desc, 1000, 0, 0),
        ScatterDst(theirs.desc, 1000, 1000, 1000),
        ScatterDst(ours.desc, 1000, 2000, 0),
    ]
    finish([wide.a.submit_scatter(group, None, imm, source.handle, parts), *arrived])
    assert theirs.get() + ours.get() == source.get()
    assert (wide.b.free_imm(imm), wide.a.free_imm(imm)) == (0, 0)


def test_an_empty_part_of_a_scatter_still_counts(wide: Pair) -> None:
    """C4: a peer that gets nothing this time still learns that it is its turn."""
    source, target = Memory(wide.a, 100, pattern(4, 100)), Memory(wide.b, 100, GUARD)
    imm = wide.b.alloc_imm()
    arrived = wide.b.expect_imm_count(imm, 2)
    parts = [ScatterDst(target.desc, 0, 0, 0), ScatterDst(target.desc, 10, 5, 50)]
    finish([wide.a.submit_scatter(None, None, imm, source.handle, parts), arrived])
    assert target.get() == GUARD * 50 + source.get(5, 10) + GUARD * 40


def test_a_scatter_over_many_targets_ends_once(wide: Pair, kit: Kit) -> None:
    """C1, C4: one transfer however many parts."""
    count = kit.scaled(50, 300, 3000)
    source, target = Memory(wide.a, count * 100, pattern(5, count * 100)), Memory(wide.b, count * 100)
    imm, calls = wide.b.alloc_imm(), Calls()
    arrived = wide.b.expect_imm_count(imm, count)
    parts = [ScatterDst(target.desc, 100, k * 100, (count - 1 - k) * 100) for k in range(count)]
    sent = wide.a.submit_scatter(None, calls, imm, source.handle, parts)
    finish([sent, arrived])
    assert target.get() == b"".join(source.get(k * 100, 100) for k in reversed(range(count)))
    calls.wait()
    wide.a.close()
    assert calls.count == 1


def test_a_silent_scatter_completes(pair: Pair) -> None:
    """C1: imm=None."""
    source, target = Memory(pair.a, 64, pattern(6, 64)), Memory(pair.b, 64)
    finish([pair.a.submit_scatter(None, None, None, source.handle, [ScatterDst(target.desc, 64, 0, 0)])])


def test_a_barrier_counts_once_at_each_target(engines: Engines, nics: int) -> None:
    """C4: nothing is written, one count each, for any number of NICs."""
    a, peers = engines.open(nics=nics), [engines.open(nics=nics) for _ in range(3)]
    targets = [Memory(peer, 64, GUARD) for peer in peers]
    imm = common_imm(*peers)
    arrived = [peer.expect_imm_count(imm, 1) for peer in peers]
    group, calls = a.add_peer_group([peer.address for peer in peers]), Calls()
    sent = a.submit_barrier(group, calls, imm, [target.desc for target in targets])
    finish([sent, *arrived])
    assert all(target.get() == GUARD * 64 for target in targets)
    assert [peer.free_imm(imm) for peer in peers] == [0, 0, 0]
    assert calls.wait() == [sent]


@pytest.mark.parametrize("rounds", [10])
def test_barriers_keep_two_processes_in_step(engine: TransferEngine, remote: Remote, rounds: int) -> None:
    """C3, C4: each side announces its turn and waits for the other's."""
    mine, theirs = Memory(engine, 64), remote.memory(64)
    imm_here, imm_there = engine.alloc_imm(), remote.alloc_imm()
    for _ in range(rounds):
        there = remote.expect(imm_there, 1)
        remote.do("barrier", imm=imm_here, descs=[mine.blob])
        here = engine.expect_imm_count(imm_here, 1)
        finish([engine.submit_barrier(None, None, imm_there, [theirs.desc]), here])
        remote.ends_well(there)
    assert engine.free_imm(imm_here) == 0
    assert remote.do("free_imm", imm=imm_there) == 0
