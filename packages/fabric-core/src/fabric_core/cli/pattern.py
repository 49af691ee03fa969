"""Bytes that a benchmark sends and its peer can make again, so that every measurement also proves that data arrived.

The block repeats with a prime period: a piece that lands at a wrong multiple of the page size does not match by chance.
"""

from __future__ import annotations

import random
from array import array

__all__ = ["count_wrong", "expected_pages", "fill", "permutation"]

_PERIOD = 1_048_573  # the largest prime below 1 MiB


def fill(buffer: memoryview, seed: int) -> None:
    """Write the pattern of `seed` over the whole buffer (format "B")."""
    block = random.Random(seed).randbytes(min(_PERIOD, max(1, len(buffer))))
    for start in range(0, len(buffer), len(block)):
        part = buffer[start : start + len(block)]
        part[:] = block[: len(part)]


def permutation(count: int, seed: int) -> array[int]:
    """Return 0..count-1 in an order that depends on `seed` alone, as u32."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return array("I", order)


def expected_pages(length: int, seed: int, page: int, order: array[int], span: int) -> bytearray:
    """Return what the target holds after paged writes: within each `span`, page k of the source is at order[k]."""
    source = bytearray(length)
    fill(memoryview(source), seed)
    target = bytearray(length)
    for base in range(0, length, span):
        for k, place in enumerate(order):
            start = base + k * page
            target[base + place * page : base + (place + 1) * page] = source[start : start + page]
    return target


def count_wrong(found: memoryview, wanted: memoryview) -> int:
    """Count bytes that differ. Fast where nothing does."""
    wrong = abs(len(found) - len(wanted))
    length = min(len(found), len(wanted))
    for start in range(0, length, 65536):
        a, b = found[start : min(start + 65536, length)], wanted[start : min(start + 65536, length)]
        if a != b:
            wrong += sum(x != y for x, y in zip(a, b, strict=True))
    return wrong
