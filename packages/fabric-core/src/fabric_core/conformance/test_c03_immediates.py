"""C3: immediates are never lost. Early ones are counted, surplus is reported, expectations end.

C4's second half is here too: a late immediate of an earlier generation is counted as stray, never credited.
"""

from __future__ import annotations

import pytest

from fabric_core import BadRange, Cancelled, DeadlineExceeded, FabricError, QueueFull, StaleHandle, TransferEngine
from fabric_core.conformance.kit import Calls, Engines, Kit, Memory, Pair, eventually, fails, finish
from fabric_core.conformance.remote import Remote


def raise_imm(sender: TransferEngine, target: Memory, imm: int, count: int = 1) -> None:
    """`imm` arrives `count` times; returns when the sender was told so."""
    finish(sender.submit_barrier(None, None, imm, [target.desc]) for _ in range(count))


def test_immediates_before_the_expectation_count(wide: Pair) -> None:
    """C3: the expectation finds them and ends without any more."""
    imm, target = wide.b.alloc_imm(), Memory(wide.b, 64)
    raise_imm(wide.a, target, imm, 5)
    eventually(lambda: wide.b.imm_count(imm) == 5, "five immediates are counted before anybody expects them")
    finish([wide.b.expect_imm_count(imm, 5)])
    assert wide.b.imm_count(imm) == 0
    assert wide.b.free_imm(imm) == 0


def test_some_before_and_some_after_the_expectation_add_up(wide: Pair) -> None:
    """C3: setting an expectation resets nothing."""
    imm, target = wide.b.alloc_imm(), Memory(wide.b, 64)
    raise_imm(wide.a, target, imm, 3)
    eventually(lambda: wide.b.imm_count(imm) == 3, "three come early")
    expectation = wide.b.expect_imm_count(imm, 5)
    assert not expectation.done
    raise_imm(wide.a, target, imm, 2)
    finish([expectation])
    assert wide.b.free_imm(imm) == 0


def test_surplus_is_reported_when_the_immediate_is_freed(wide: Pair) -> None:
    """C3: and not swallowed."""
    imm, target = wide.b.alloc_imm(), Memory(wide.b, 64)
    expectation = wide.b.expect_imm_count(imm, 2)
    raise_imm(wide.a, target, imm, 5)
    finish([expectation])
    eventually(lambda: wide.b.imm_count(imm) == 3, "three more than were expected")
    assert wide.b.free_imm(imm) == 3


def test_expectations_on_one_immediate_are_served_in_order(pair: Pair) -> None:
    """C3: each takes its count; the first in line is never overtaken by a smaller one behind it."""
    imm, target, calls = pair.b.alloc_imm(), Memory(pair.b, 64), Calls()
    first, second, third = (pair.b.expect_imm_count(imm, count, calls) for count in (3, 1, 2))
    raise_imm(pair.a, target, imm, 2)
    eventually(lambda: pair.b.imm_count(imm) == 2, "two arrive and wait for the third")
    assert (first.done, second.done, third.done) == (False, False, False)
    raise_imm(pair.a, target, imm, 1)
    finish([first])
    assert (second.done, third.done) == (False, False)
    raise_imm(pair.a, target, imm, 3)
    finish([second, third])
    assert calls.wait(3) == [first, second, third]
    assert pair.b.free_imm(imm) == 0


def test_one_batch_serves_several_expectations(pair: Pair) -> None:
    """C3: what arrived at once is dealt out to all that are in line."""
    imm, target = pair.b.alloc_imm(), Memory(pair.b, 64)
    raise_imm(pair.a, target, imm, 6)
    eventually(lambda: pair.b.imm_count(imm) == 6, "all six are early")
    finish([pair.b.expect_imm_count(imm, count) for count in (1, 2, 3)])
    assert pair.b.free_imm(imm) == 0


def test_an_expectation_of_nothing_is_done_at_once(engine: TransferEngine) -> None:
    """C3: zero is a count like any other, or refused at once; never a wait."""
    imm = engine.alloc_imm()
    try:
        finish([engine.expect_imm_count(imm, 0)], timeout=5)
    except BadRange:
        return
    assert engine.free_imm(imm) == 0


def test_immediates_do_not_touch_each_other(pair: Pair) -> None:
    """C3: each number has its own count."""
    imms, target = [pair.b.alloc_imm() for _ in range(50)], Memory(pair.b, 64)
    assert len(set(imms)) == 50
    expectations = [pair.b.expect_imm_count(imm, k % 3 + 1) for k, imm in enumerate(imms)]
    for k, imm in enumerate(imms):
        raise_imm(pair.a, target, imm, k % 3 + 1)
    finish(expectations)
    assert [pair.b.free_imm(imm) for imm in imms] == [0] * 50


def test_immediates_use_29_bits(engine: TransferEngine) -> None:
    """C4: the top three bits are the wire's; what the user sees has them clear."""
    imms = [engine.alloc_imm() for _ in range(1000)]
    assert len(set(imms)) == 1000
    assert all(0 <= imm < 1 << 29 for imm in imms)


def test_a_late_immediate_is_a_stray_and_not_the_new_owners(engines: Engines) -> None:
    """C4: free and alloc make a new generation; the old number is counted apart while another owns the same slot."""
    sender, receiver = engines.open(), engines.open(imm_slots=256)
    target = Memory(receiver, 64)
    before = strays(receiver)
    old = receiver.alloc_imm()
    assert receiver.free_imm(old) == 0
    owners = [receiver.alloc_imm() for _ in range(256)]  # all slots, so the old one too
    assert old not in owners
    raise_imm(sender, target, old, 3)
    eventually(lambda: strays(receiver) == before + 3, "three strays are counted")
    assert [receiver.imm_count(imm) for imm in owners] == [0] * 256
    raise_imm(sender, target, owners[-1])
    finish([receiver.expect_imm_count(owners[-1], 1)])


def test_an_immediate_that_nobody_allocated_is_a_stray(pair: Pair, engines: Engines) -> None:
    """C4, C12: a number out of thin air is counted, and hurts nobody."""
    target, before = Memory(pair.b, 64), strays(pair.b)
    ours = pair.b.alloc_imm()
    raise_imm(pair.a, target, (1 << 29) - 1, 2)
    eventually(lambda: strays(pair.b) == before + 2, "two strays are counted")
    raise_imm(pair.a, target, ours)
    finish([pair.b.expect_imm_count(ours, 1)])


def strays(engine: TransferEngine) -> int:
    """The engine's count of stray immediates, wherever stats() keeps it."""
    engine.progress()
    found = [value for key, value in flat(engine.stats()).items() if "stray" in key]
    assert found, "stats() counts stray immediates under a name with 'stray' in it"
    return int(found[0])


def flat(stats: object, prefix: str = "") -> dict[str, int]:
    if isinstance(stats, dict):
        merged: dict[str, int] = {}
        for key, value in stats.items():
            merged.update(flat(value, f"{prefix}.{key}"))
        return merged
    return {prefix: stats} if isinstance(stats, int) else {}


def test_there_are_as_many_immediates_as_the_settings_say(engines: Engines) -> None:
    """C8: the next one is refused at once, and one that was given back can be had again."""
    engine = engines.open(imm_slots=256)
    imms = [engine.alloc_imm() for _ in range(256)]
    with pytest.raises(QueueFull):
        engine.alloc_imm()
    engine.free_imm(imms[3])
    assert engine.alloc_imm() not in imms


def test_a_freed_immediate_is_refused(engine: TransferEngine) -> None:
    """C6: twice freed, or expected after it was freed, is the caller's mistake and is said at once."""
    imm = engine.alloc_imm()
    engine.free_imm(imm)
    for attempt in (engine.free_imm, engine.imm_count, lambda freed: engine.expect_imm_count(freed, 1)):
        with pytest.raises(StaleHandle):
            attempt(imm)


def test_freeing_an_immediate_ends_its_expectations(engine: TransferEngine) -> None:
    """C1, C3: nobody waits for a number that is gone; or the engine refuses to free it meanwhile."""
    imm, calls = engine.alloc_imm(), Calls()
    expectation = engine.expect_imm_count(imm, 1, calls)
    try:
        engine.free_imm(imm)
    except FabricError:
        expectation.cancel()
    fails(expectation, Cancelled, within=10)
    calls.wait()
    engine.close()
    assert calls.count == 1


def test_an_expectation_that_times_out_lets_the_next_one_through(pair: Pair) -> None:
    """C3: the one at the head of the line gives way; what had arrived is still there."""
    imm, target = pair.b.alloc_imm(), Memory(pair.b, 64)
    head = pair.b.expect_imm_count(imm, 5, timeout=0.3)
    behind = pair.b.expect_imm_count(imm, 2)
    raise_imm(pair.a, target, imm, 2)
    fails(head, DeadlineExceeded, within=10)
    finish([behind])
    assert pair.b.free_imm(imm) == 0


def test_immediates_can_be_used_up_and_used_again(pair: Pair, kit: Kit) -> None:
    """C4: many generations of one slot, each with its own count."""
    target = Memory(pair.b, 64)
    for _ in range(kit.scaled(40, 100, 2000)):
        imm = pair.b.alloc_imm()
        raise_imm(pair.a, target, imm)
        finish([pair.b.expect_imm_count(imm, 1)])
        assert pair.b.free_imm(imm) == 0


def test_large_counts_are_exact(wide: Pair, kit: Kit) -> None:
    """C4: one expectation over many immediates, to the last one."""
    imm, target, count = wide.b.alloc_imm(), Memory(wide.b, 64), kit.scaled(500, 3000, 100_000)
    expectation = wide.b.expect_imm_count(imm, count)
    raise_imm(wide.a, target, imm, count - 1)
    eventually(lambda: wide.b.imm_count(imm) == count - 1, "all but one arrive")
    assert not expectation.done
    raise_imm(wide.a, target, imm)
    finish([expectation])
    assert wide.b.free_imm(imm) == 0


def test_early_immediates_of_another_process_count(engine: TransferEngine, remote: Remote) -> None:
    """C3: the same across processes: they were all there before anybody asked."""
    target, imm = remote.memory(64), remote.alloc_imm()
    finish(engine.submit_barrier(None, None, imm, [target.desc]) for _ in range(10))
    remote.ends_well(remote.expect(imm, 10))
    assert remote.do("free_imm", imm=imm) == 0
