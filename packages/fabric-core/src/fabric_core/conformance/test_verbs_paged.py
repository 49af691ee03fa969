"""Paged writes: lists of pages with strides and offsets, byte-exact, one count per page (C4, C5)."""

from __future__ import annotations

import array
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fabric_core import BadRange, Pages
from fabric_core.conformance.kit import GUARD, Engines, Kit, Memory, Pair, finish, pattern
from fabric_core.conformance.remote import Remote

KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "array": lambda indices: array.array("I", indices),
    "numpy": lambda indices: np.array(indices, np.uint32),
    "numpy-view": lambda indices: np.array(indices * 2, np.uint32)[: len(indices)],
    "memoryview": lambda indices: memoryview(array.array("I", indices)),
}


def layout(source: bytes, target: bytes, page: int, src: tuple[Any, int, int], dst: tuple[Any, int, int]) -> bytes:
    """What the target holds afterwards: the specification of a paged write, in Python."""
    result = bytearray(target)
    for i, j in zip(src[0], dst[0], strict=True):
        begin, end = src[2] + i * src[1], dst[2] + j * dst[1]
        result[end : end + page] = source[begin : begin + page]
    return bytes(result)


def run(pair: Pair, page: int, src: tuple[Any, int, int], dst: tuple[Any, int, int], sizes: tuple[int, int]) -> None:
    """Submits one paged write with an immediate and checks every byte of the target, and the count."""
    source, target = Memory(pair.a, sizes[0], pattern(page, sizes[0])), Memory(pair.b, sizes[1], GUARD)
    wanted = layout(source.get(), target.get(), page, src, dst)
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, len(src[0]))
    sent = pair.a.submit_paged_writes(page, imm, (source.handle, Pages(*src)), (target.desc, Pages(*dst)))
    finish([arrived, sent])
    assert target.get() == wanted
    assert pair.b.free_imm(imm) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_indices_may_be_any_u32_buffer_or_a_list(wide: Pair, kind: str) -> None:
    """C5: and the result is the same for all of them."""
    src, dst = [5, 0, 3, 1], [2, 7, 0, 4]
    run(wide, 1000, (KINDS[kind](src), 1000, 0), (KINDS[kind](dst), 1000, 0), (8000, 8000))


def test_torch_indices_are_taken_as_they_are(pair: Pair) -> None:
    """C5: int32 tensors of the CPU."""
    torch = pytest.importorskip("torch")
    src, dst = torch.tensor([1, 0, 2], dtype=torch.int32), torch.tensor([0, 3, 1], dtype=torch.int32)
    run(pair, 256, (src, 256, 0), (dst, 256, 0), (1024, 1024))


@pytest.mark.parametrize("page", [1, 63, 64, 1000, 4096, 16_385])
def test_gaps_between_pages_stay_untouched(wide: Pair, page: int) -> None:
    """C5: strides larger than the page, offsets on both sides, odd lengths."""
    src = ([4, 1, 0, 6, 2], page + 13, 17)
    dst = ([0, 2, 5, 3, 1], page + 29, 5)
    run(wide, page, src, dst, (17 + 7 * (page + 13), 5 + 6 * (page + 29)))


def test_4096_pages_in_random_order_arrive_byte_exact(wide: Pair, kit: Kit) -> None:
    """C5, C4: as many pages as a KV cache has, each counted."""
    pages, page = 4096, 256
    shuffle = random.Random(kit.seed)
    src, dst = shuffle.sample(range(pages), pages), shuffle.sample(range(pages), pages)
    run(
        wide,
        page,
        (np.array(src, np.uint32), page, 0),
        (np.array(dst, np.uint32), page + 64, 32),
        (pages * page, 64 + pages * (page + 64)),
    )


def test_one_source_page_may_go_to_many_places(wide: Pair) -> None:
    """C5: repeated indices on the source's side."""
    run(wide, 512, ([3] * 8, 512, 0), (list(range(8)), 512, 0), (2048, 4096))


def test_pages_of_the_source_may_overlap(wide: Pair) -> None:
    """C5: a stride shorter than the page is a sliding window over the source."""
    run(wide, 512, ([0, 1, 2, 3], 100, 0), ([3, 2, 1, 0], 512, 0), (1000, 2048))


def test_a_stride_of_zero_repeats_the_source(pair: Pair) -> None:
    """C5: every index then means the same page."""
    run(pair, 300, ([9, 8, 7], 0, 50), ([0, 1, 2], 300, 0), (400, 900))


def test_a_silent_paged_write_completes_too(wide: Pair) -> None:
    """C1: without an immediate the sender's completion is all there is."""
    source, target = Memory(wide.a, 64 * 64, pattern(1, 64 * 64)), Memory(wide.b, 64 * 64)
    pages = list(range(64))
    finish([wide.a.submit_paged_writes(64, None, (source.handle, Pages(pages, 64)), (target.desc, Pages(pages, 64)))])


@pytest.mark.parametrize("with_imm", [True, False], ids=["imm", "silent"])
def test_no_pages_at_all_is_a_transfer_that_is_done(pair: Pair, with_imm: bool) -> None:
    """C1, C4: nothing to write, nothing to count, and still one end."""
    source, target = Memory(pair.a, 64), Memory(pair.b, 64)
    imm = pair.b.alloc_imm()
    try:
        sent = pair.a.submit_paged_writes(
            64, imm if with_imm else None, (source.handle, Pages([], 64)), (target.desc, Pages([], 64))
        )
    except BadRange:
        return  # also an answer: it was said at once
    finish([sent])
    assert pair.b.free_imm(imm) == 0


def test_pages_cross_between_processes(engines: Engines, remote: Remote) -> None:
    """C5, C10: the payload of each page is there when the peer's callback runs."""
    pages, page = 64, 4096
    engine = engines.open()
    source, target = Memory(engine, pages * page, pattern(5, pages * page), shared=False), remote.memory(pages * page)
    imm = remote.alloc_imm()
    arrived = remote.expect(imm, pages, ranges=[(target.number, 0, pages * page)])
    order = random.Random(5).sample(range(pages), pages)
    finish(
        [engine.submit_paged_writes(page, imm, (source.handle, Pages(order, page)), (target.desc, Pages(order, page)))]
    )
    answer = remote.ends_well(arrived)
    assert answer["seen"] == [[target.crc()]]
    assert target.holds(pattern(5, pages * page))


def test_the_index_list_is_copied_at_submit(pair: Pair) -> None:
    """C7: the caller may change its list as soon as submit returned."""
    source, target = Memory(pair.a, 64 * 512, pattern(6, 64 * 512)), Memory(pair.b, 64 * 512)
    indices = np.arange(64, dtype=np.uint32)
    sent = pair.a.submit_paged_writes(
        512, None, (source.handle, Pages(indices, 512)), (target.desc, Pages(indices, 512))
    )
    indices[:] = 0
    finish([sent])
    imm = pair.b.alloc_imm()
    arrived = pair.b.expect_imm_count(imm, 1)
    finish([pair.a.submit_single_write(0, imm, (source.handle, 0), (target.desc, 0)), arrived])
    assert target.get() == source.get()
