"""C10: when a completion is seen, the data is there. Each page is checked inside the callback, as early as possible."""

from __future__ import annotations

import zlib

import pytest

from fabric_core import Pages
from fabric_core.conformance.kit import Calls, Engines, Kit, Memory, Pair, after, eventually, finish, pattern
from fabric_core.conformance.remote import Remotes

LENGTHS = [1, 64, 4096, 16_385, 300_000]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "heap"])
def test_the_payload_is_there_in_the_callback_of_another_process(
    engines: Engines, remotes: Remotes, kit: Kit, nics: int, shared: bool
) -> None:
    """C10: many rounds, each with a new content, checksummed by the peer inside its callback."""
    engine, remote = engines.open(nics=nics), remotes.start(nics=nics)
    imm = remote.alloc_imm()
    for length in LENGTHS:
        source, target = Memory(engine, length, shared=shared), remote.memory(length, shared=shared)
        for turn in range(kit.scaled(3, 10, 200)):
            source.put(pattern(turn, length))
            arrived = remote.expect(imm, 1, ranges=[(target.number, 0, length)])
            finish([engine.submit_single_write(length, imm, (source.handle, 0), (target.desc, 0))])
            seen = remote.ends_well(arrived)["seen"]
            assert seen == [[zlib.crc32(pattern(turn, length))]], f"{length} bytes, round {turn}"


def test_each_page_is_there_when_its_own_immediate_is(wide: Pair, kit: Kit) -> None:
    """C10: one immediate per page: every callback looks at its page at once, while others are still in flight."""
    pages, page = kit.scaled(64, 256, 4096), 4096 + 13
    source, target = Memory(wide.a, pages * page, pattern(1, pages * page)), Memory(wide.b, pages * page)
    wanted, wrong, looked = source.get(), Calls(), Calls()

    def look(k: int) -> None:
        if target.get(k * page, page) != wanted[k * page : (k + 1) * page]:
            wrong(k)
        looked(k)

    imms = [wide.b.alloc_imm() for _ in range(pages)]
    for k, imm in enumerate(imms):
        wide.b.expect_imm_count(imm, 1, after(look, k))
    for k, imm in enumerate(imms):
        wide.a.submit_single_write(page, imm, (source.handle, k * page), (target.desc, k * page))
    looked.wait(pages)
    assert wrong.firsts == []


def test_all_pages_are_there_when_their_count_is(wide: Pair, kit: Kit) -> None:
    """C10: the callback of one expectation over a whole paged write."""
    pages, page = kit.scaled(128, 1024, 4096), 1024
    source, target = Memory(wide.a, pages * page), Memory(wide.b, pages * page)
    indices, imm = list(range(pages)), wide.b.alloc_imm()
    for turn in range(kit.scaled(2, 5, 50)):
        source.put(pattern(turn, pages * page))
        seen = Calls()
        wide.b.expect_imm_count(imm, pages, after(lambda calls: calls(target.get()), seen))
        wide.a.submit_paged_writes(
            page, imm, (source.handle, Pages(indices, page)), (target.desc, Pages(indices[::-1], page))
        )
        wanted = source.get()
        (got,) = seen.wait()
        assert got == b"".join(wanted[k * page : (k + 1) * page] for k in reversed(indices))


@pytest.mark.parametrize("seen_by", ["wait", "done", "count"])
def test_the_payload_is_there_however_one_learns_of_it(pair: Pair, kit: Kit, seen_by: str) -> None:
    """C10: wait(), done and imm_count() are as good as a callback."""
    length = 100_000
    source, target = Memory(pair.a, length), Memory(pair.b, length)
    imm = pair.b.alloc_imm()
    for turn in range(kit.scaled(5, 20, 500)):
        source.put(pattern(turn, length))
        arrived = None if seen_by == "count" else pair.b.expect_imm_count(imm, 1)
        pair.a.submit_single_write(length, imm, (source.handle, 0), (target.desc, 0))
        if arrived is None:
            eventually(lambda: pair.b.imm_count(imm) == 1, "the immediate arrives")
        elif seen_by == "wait":
            arrived.wait(20)
        else:
            eventually(lambda it=arrived: it.done, "the expectation ends")  # type: ignore[misc]
        assert target.get() == pattern(turn, length), f"round {turn}"
        if arrived is None:
            finish([pair.b.expect_imm_count(imm, 1)])


def test_a_message_is_whole_when_it_is_handed_over(wide: Pair, kit: Kit) -> None:
    """C10: the bytes of a message, up to the longest."""
    count, size, calls = kit.scaled(10, 30, 300), wide.a.max_message, Calls()
    wide.b.submit_recvs(size, 2, calls)
    for k in range(count):
        wide.a.submit_send(wide.b.address, pattern(k, size - k))
    calls.wait(count)
    assert sorted(calls.firsts) == sorted(pattern(k, size - k) for k in range(count))
