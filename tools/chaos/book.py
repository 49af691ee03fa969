"""Known bytes. Every process makes the same book; a round names a place in it, so nothing has to be sent twice."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

__all__ = ["BOOK", "BOOK_BYTES", "EDGE", "GUARD", "SLOT", "Shape"]

BOOK_BYTES = 1 << 20
BOOK = random.Random("the book").randbytes(BOOK_BYTES)
SLOT = 160 << 10  #: bytes of a slot
EDGE = 64  #: bytes at both ends of a slot that nobody may touch
GUARD = 0xA5
_MOST = 128 << 10


@dataclass(frozen=True, slots=True)
class Shape:
    """The geometry of one round: `parts` writes of `length` bytes; part k goes to place `order[k]` of the slot."""

    verb: str  # "write", "paged", "scatter"
    length: int
    parts: int
    gap: int
    page: int  # where in the book the first part begins
    seed: int

    @classmethod
    def draw(cls, rng: random.Random, verb: str, most: int = _MOST) -> Shape:
        parts = 1 if verb == "write" else rng.randint(1, 24)
        least = 0 if verb == "write" else 1
        length = min(most // parts, int(2 ** rng.uniform(0, 17)) - 1)
        length = max(least, length)
        gap = rng.choice((0, 1, 32, 64))
        return cls(verb, length, parts, gap, rng.randrange(BOOK_BYTES - _MOST - 1), rng.getrandbits(30))

    def to_list(self) -> list[Any]:
        return [self.verb, self.length, self.parts, self.gap, self.page, self.seed]

    @classmethod
    def from_list(cls, fields: list[Any]) -> Shape:
        return cls(*fields)

    @property
    def stride(self) -> int:
        return self.length + self.gap

    def order(self) -> list[int]:
        places = list(range(self.parts))
        random.Random(self.seed).shuffle(places)
        return places

    def image(self, nbytes: int) -> bytes:
        """What the slot must hold when all has arrived, edges and gaps included."""
        image = bytearray([GUARD]) * nbytes
        for k, place in enumerate(self.order()):
            at, start = EDGE + place * self.stride, self.page + k * self.length
            image[at : at + self.length] = BOOK[start : start + self.length]
        return bytes(image)

    def first_difference(self, seen: bytes) -> str:
        """Say where `seen` differs from the image, for a report."""
        image = self.image(len(seen))
        wrong = [i for i in range(len(seen)) if seen[i] != image[i]]
        if not wrong:
            return "equal now"
        guard = sum(seen[i] == GUARD for i in wrong)
        return f"{len(wrong)} bytes wrong, {wrong[0]} to {wrong[-1]}, {guard} of them never written; {self}"
