"""C6: a bad request is refused at submit with an error that names the numbers; it never reaches a NIC.

After each refusal the same engine does a good transfer: nothing was poisoned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from fabric_core import BadRange, Expectation, FabricError, Pages, RemoteAccessError, ScatterDst, StaleHandle
from fabric_core.conformance.kit import Calls, Engines, Memory, Pair, fails, finish, pattern
from fabric_core.conformance.remote import Remote

SIZE = 4096


@dataclass
class Ready:
    """A pair with one region each and an immediate."""

    pair: Pair
    source: Memory
    target: Memory
    imm: int

    def write(self, length: int, at: int = 0, to: int = 0, **more: Any) -> Any:
        return self.pair.a.submit_single_write(length, None, (self.source.handle, at), (self.target.desc, to), **more)

    def paged(self, length: int, src: Pages, dst: Pages) -> Any:
        return self.pair.a.submit_paged_writes(length, None, (self.source.handle, src), (self.target.desc, dst))

    def scatter(self, *parts: tuple[int, int, int]) -> Any:
        targets = [ScatterDst(self.target.desc, length, at, to) for length, at, to in parts]
        return self.pair.a.submit_scatter(None, None, None, self.source.handle, targets)

    def expect(self) -> Expectation:
        return self.pair.b.expect_imm_count(self.imm, 1)


@pytest.fixture
def ready(pair: Pair) -> Iterator[Ready]:
    it = Ready(pair, Memory(pair.a, SIZE, pattern(1, SIZE)), Memory(pair.b, SIZE), pair.b.alloc_imm())
    yield it
    if pair.a.closed:
        return
    arrived = it.expect()
    good = pair.a.submit_single_write(SIZE, it.imm, (it.source.handle, 0), (it.target.desc, 0))
    finish([good, arrived])  # the engine lives on
    assert it.target.get() == pattern(1, SIZE)
    assert pair.b.free_imm(it.imm) == 0


OUTSIDE: dict[str, tuple[Callable[[Ready], Any], list[int]]] = {
    "write: longer than the source": (lambda r: r.write(SIZE + 1), [SIZE + 1, SIZE]),
    "write: source offset at the end": (lambda r: r.write(1, at=SIZE), [SIZE]),
    "write: source offset beyond the end": (lambda r: r.write(0, at=SIZE + 1), [SIZE + 1, SIZE]),
    "write: runs over the source's end": (lambda r: r.write(96, at=4001), [96, 4001, SIZE]),
    "write: target offset at the end": (lambda r: r.write(1, to=SIZE), [SIZE]),
    "write: runs over the target's end": (lambda r: r.write(96, to=4001), [96, 4001, SIZE]),
    "write: length of 2**64 - 1": (lambda r: r.write(2**64 - 1), [SIZE]),
    "write: offset that wraps around": (lambda r: r.write(64, at=2**64 - 32), [SIZE]),
    "write: target offset that wraps around": (lambda r: r.write(64, to=2**64 - 32), [SIZE]),
    "write: beyond 64 bits": (lambda r: r.write(2**64 + 5), []),
    "write: negative length": (lambda r: r.write(-1), [-1]),
    "write: negative offset": (lambda r: r.write(1, at=-1), [-1]),
    "write: negative target offset": (lambda r: r.write(1, to=-1), [-1]),
    "paged: an index beyond the source": (lambda r: r.paged(64, Pages([0, 64], 64), Pages([0, 1], 64)), [64, SIZE]),
    "paged: an index beyond the target": (lambda r: r.paged(64, Pages([0, 1], 64), Pages([0, 64], 64)), [64, SIZE]),
    "paged: the last page ends too late": (lambda r: r.paged(65, Pages([63], 64), Pages([0], 64)), [63, SIZE]),
    "paged: an offset pushes it out": (lambda r: r.paged(64, Pages([63], 64, 1), Pages([0], 64)), [63, SIZE]),
    "paged: a target offset pushes it out": (lambda r: r.paged(64, Pages([0], 64), Pages([63], 64, 1)), [63, SIZE]),
    "paged: more pages here than there": (lambda r: r.paged(64, Pages([0, 1], 64), Pages([0], 64)), [2, 1]),
    "paged: fewer pages here than there": (lambda r: r.paged(64, Pages([0], 64), Pages([0, 1], 64)), [1, 2]),
    "paged: a stride that wraps around": (lambda r: r.paged(64, Pages([2], 2**63), Pages([0], 64)), [SIZE]),
    "paged: an offset that wraps around": (lambda r: r.paged(64, Pages([0], 64, 2**64 - 64), Pages([0], 64)), [SIZE]),
    "paged: the largest index": (lambda r: r.paged(64, Pages([2**32 - 1], 64), Pages([0], 64)), [2**32 - 1, SIZE]),
    "paged: an index beyond 32 bits": (lambda r: r.paged(64, Pages([2**32], 64), Pages([0], 64)), []),
    "paged: a negative index": (lambda r: r.paged(64, Pages([-1], 64), Pages([0], 64)), []),
    "paged: a page longer than the region": (lambda r: r.paged(SIZE + 1, Pages([0], 0), Pages([0], 0)), [SIZE]),
    "scatter: a part beyond the source": (lambda r: r.scatter((64, 0, 0), (64, SIZE, 0)), [64, SIZE]),
    "scatter: a part beyond the target": (lambda r: r.scatter((64, 0, 0), (64, 0, SIZE - 63)), [64, SIZE]),
    "scatter: a part of 2**64 - 1 bytes": (lambda r: r.scatter((2**64 - 1, 1, 1)), [SIZE]),
    "scatter: a negative offset": (lambda r: r.scatter((1, -1, 0)), [-1]),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_a_range_outside_its_region_is_refused_and_the_numbers_are_named(ready: Ready, case: str) -> None:
    """C6: BadRange, which is a ValueError; nothing is written."""
    attempt, numbers = OUTSIDE[case]
    with pytest.raises(BadRange) as refused:
        attempt(ready)
    assert isinstance(refused.value, ValueError)
    text = str(refused.value).replace(",", "").replace("_", "")
    for number in numbers:
        assert str(number) in text, f"{number} is not in: {refused.value}"
    assert ready.target.get() == bytes(SIZE)


def test_a_refused_submit_calls_nobody_back(ready: Ready) -> None:
    """C1: the exception is the end; a callback would be a second one."""
    calls = Calls()
    with pytest.raises(BadRange):
        ready.pair.a.submit_single_write(SIZE + 1, None, (ready.source.handle, 0), (ready.target.desc, 0), calls)
    finish([ready.write(1)])
    ready.pair.a.close()
    assert calls.count == 0


def test_the_edges_of_a_region_are_inside(ready: Ready) -> None:
    """C6: the last byte can be written, and nothing at the very end."""
    finish([ready.write(SIZE), ready.write(1, at=SIZE - 1, to=SIZE - 1), ready.write(0, at=SIZE, to=SIZE)])


@pytest.mark.parametrize("nic", [1, -1, 8, 2**31, 2**40])
def test_a_nic_that_is_not_there_is_refused(ready: Ready, nic: int) -> None:
    """C6: pinning goes to a NIC of this engine."""
    with pytest.raises((BadRange, ValueError)) as refused:
        ready.write(1, nic=nic)
    assert isinstance(refused.value, FabricError)
    assert str(nic) in str(refused.value)


@pytest.mark.parametrize("imm", [1 << 29, 1 << 31, 1 << 32, -1])
def test_an_immediate_out_of_range_is_refused(ready: Ready, imm: int) -> None:
    """C6, C4: the top three bits belong to the wire."""
    with pytest.raises(ValueError) as refused:
        ready.pair.a.submit_single_write(1, imm, (ready.source.handle, 0), (ready.target.desc, 0))
    assert isinstance(refused.value, FabricError)


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_a_timeout_that_makes_no_sense_is_refused(ready: Ready, timeout: float) -> None:
    """C6: for writes and for expectations."""
    with pytest.raises(ValueError):
        ready.write(1, timeout=timeout)
    with pytest.raises(ValueError):
        ready.pair.b.expect_imm_count(ready.imm, 1, timeout=timeout)


def test_a_closed_handle_is_refused_by_every_verb(ready: Ready) -> None:
    """C6: StaleHandle, also after the number was given to another region."""
    pair = ready.pair
    freed = Memory(pair.a, SIZE)
    pair.a.dereg_mr(freed.handle)
    Memory(pair.a, SIZE)  # may take the same slot
    attempts: list[Callable[[], Any]] = [
        lambda: pair.a.submit_single_write(1, None, (freed.handle, 0), (ready.target.desc, 0)),
        lambda: pair.a.submit_paged_writes(1, None, (freed.handle, Pages([0], 1)), (ready.target.desc, Pages([0], 1))),
        lambda: pair.a.submit_scatter(None, None, None, freed.handle, [ScatterDst(ready.target.desc, 1, 0, 0)]),
    ]
    for attempt in attempts:
        with pytest.raises(StaleHandle):
            attempt()


def test_a_handle_of_another_engine_is_refused(ready: Ready) -> None:
    """C6: handles belong to the engine that made them."""
    with pytest.raises(StaleHandle):
        ready.pair.a.submit_single_write(1, None, (ready.target.handle, 0), (ready.target.desc, 0))


def test_a_target_that_is_not_in_the_group_is_refused(ready: Ready, engines: Engines) -> None:
    """C6: a scatter over a group writes to its members only."""
    group = ready.pair.a.add_peer_group([ready.pair.b.address])
    stranger = Memory(engines.open(), 64)
    with pytest.raises(ValueError):
        ready.pair.a.submit_scatter(group, None, None, ready.source.handle, [ScatterDst(stranger.desc, 1, 0, 0)])


def test_a_region_without_the_right_to_write_is_refused(ready: Ready) -> None:
    """C6: descriptors carry rights; the sender knows before it sends."""
    closed = Memory(ready.pair.b, SIZE, pattern(2, SIZE), write=False)
    attempts: list[Callable[[], Any]] = [
        lambda: ready.pair.a.submit_single_write(1, None, (ready.source.handle, 0), (closed.desc, 0)),
        lambda: ready.pair.a.submit_paged_writes(
            1, None, (ready.source.handle, Pages([0], 1)), (closed.desc, Pages([0], 1))
        ),
        lambda: ready.pair.a.submit_scatter(None, None, None, ready.source.handle, [ScatterDst(closed.desc, 1, 0, 0)]),
    ]
    for attempt in attempts:
        with pytest.raises((BadRange, RemoteAccessError)):
            attempt()
    assert closed.get() == pattern(2, SIZE)


def test_a_region_without_the_right_to_write_is_a_source(ready: Ready) -> None:
    """C6: write=False is about peers; we may read it."""
    source = Memory(ready.pair.a, SIZE, pattern(3, SIZE), write=False)
    arrived = ready.expect()
    finish([ready.pair.a.submit_single_write(SIZE, ready.imm, (source.handle, 0), (ready.target.desc, 0)), arrived])
    assert ready.target.get() == pattern(3, SIZE)


def test_a_revoked_region_refuses_its_senders(engines: Engines, remote: Remote) -> None:
    """C6, C11: the sender still holds the descriptor; it gets RemoteAccessError, its other traffic goes on."""
    engine, calls = engines.open(), Calls()
    source, good, gone = Memory(engine, SIZE, pattern(4, SIZE)), remote.memory(SIZE), remote.memory(SIZE)
    finish([engine.submit_single_write(SIZE, None, (source.handle, 0), (gone.desc, 0))])
    remote.do("dereg", memory=gone.number)
    for _ in range(3):
        late = engine.submit_single_write(SIZE, None, (source.handle, 0), (gone.desc, 0), calls)
        error = fails(late, RemoteAccessError, within=10)
        assert error.code in ("EKEYREVOKED", "EFAULT", "EACCES")
    calls.wait(3)
    imm = remote.alloc_imm()
    arrived = remote.expect(imm, 1)
    finish([engine.submit_single_write(SIZE, imm, (source.handle, 0), (good.desc, 0))])
    remote.ends_well(arrived)
    assert good.holds(pattern(4, SIZE))


def test_nothing_lands_in_a_region_after_it_was_revoked(pair: Pair) -> None:
    """C7: once dereg_mr returned, the memory is its owner's."""
    source, target = Memory(pair.a, 1 << 20, pattern(5, 1 << 20)), Memory(pair.b, 1 << 20)
    flying = [pair.a.submit_single_write(1 << 20, None, (source.handle, 0), (target.desc, 0)) for _ in range(8)]
    pair.b.dereg_mr(target.handle)
    target.put(bytes(1 << 20))
    for transfer in flying:
        try:
            transfer.wait(20)
        except RemoteAccessError:
            pass
    assert target.get() == bytes(1 << 20)


def test_objects_of_the_wrong_type_are_type_errors(ready: Ready) -> None:
    """C12: said by Python, before anything native sees them."""
    a, good = ready.pair.a, (ready.source.handle, 0)
    bad: list[Callable[[], Any]] = [
        lambda: a.submit_single_write("1", None, good, (ready.target.desc, 0)),  # type: ignore[arg-type]
        lambda: a.submit_single_write(1, None, (ready.target.desc, 0), good),  # type: ignore[arg-type]
        lambda: a.submit_single_write(1, None, None, (ready.target.desc, 0)),  # type: ignore[arg-type]
        lambda: a.submit_send("local:nobody", 7),
        lambda: a.reg_mr(object()),
        lambda: a.submit_single_write(1, None, good, (ready.target.desc, 0), 7),  # type: ignore[arg-type]
    ]
    for attempt in bad:
        with pytest.raises((TypeError, ValueError, AttributeError)):
            attempt()
