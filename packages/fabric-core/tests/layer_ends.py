"""Two engines of this process with a model's layers to move between them, for the tests of sequences."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from fabric_core import MrDesc, MrHandle, Pages, PreparedSequence, StepWrite, TransferEngine
from fabric_core.types import SharedMemory

LIMIT = 60.0
PAGE, PAGES, LAYERS = 256, 16, 24
LAYER = PAGE * PAGES


class Ends:
    """A source of `LAYERS` layers of pages, and a target, in two engines of this process."""

    def __init__(self, a: TransferEngine, b: TransferEngine) -> None:
        self.a, self.b = a, b
        self.mine: SharedMemory = a.empty(LAYER * LAYERS)
        self.theirs: SharedMemory = b.empty(LAYER * LAYERS)
        self.handle: MrHandle = a.reg_mr(self.mine)[0]
        self.desc: MrDesc = b.reg_mr(self.theirs)[1]
        rng = np.random.default_rng(3)
        self.words = np.frombuffer(self.mine, np.uint8)
        self.words[:] = rng.integers(1, 255, len(self.words), np.uint8)
        self.found = np.frombuffer(self.theirs, np.uint8)
        self.order = rng.permutation(PAGES).astype(np.uint32)
        self.imm = b.alloc_imm()

    def layer(self, number: int, lane: int = 0, **more: float) -> list[StepWrite]:
        """All pages of a layer, in another order there, the last one by itself."""
        here, there = (Pages(order, PAGE, number * LAYER) for order in (self.order[:-1], self.order[:-1][::-1].copy()))
        last = number * LAYER + int(self.order[-1]) * PAGE
        return [
            StepWrite(PAGE, self.imm, (self.handle, here), (self.desc, there), lane=lane, **more),  # type: ignore[arg-type]
            StepWrite(PAGE, self.imm, (self.handle, last), (self.desc, last), lane=lane, **more),  # type: ignore[arg-type]
        ]

    def moved(self, number: int) -> bool:
        """Whether that layer is there, byte for byte."""
        source, target = (words[number * LAYER :][:LAYER].reshape(PAGES, PAGE) for words in (self.words, self.found))
        return bool(
            (target[self.order[:-1][::-1]] == source[self.order[:-1]]).all()
            and (target[self.order[-1]] == source[self.order[-1]]).all()
        )

    def untouched(self, number: int) -> bool:
        return not self.found[number * LAYER :][:LAYER].any()


@contextmanager
def two(**settings: object) -> Iterator[Ends]:
    with TransferEngine.open(**settings) as a, TransferEngine.open() as b:  # type: ignore[arg-type]
        yield Ends(a, b)


def until(what: object) -> None:
    end = time.monotonic() + LIMIT
    while not what():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.001)


def word_of(sequence: PreparedSequence) -> ctypes.c_uint64:
    """The word as a GPU bumps it: behind the engine's back."""
    return ctypes.c_uint64.from_address(sequence.ptr)
