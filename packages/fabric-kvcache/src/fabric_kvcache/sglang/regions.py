"""Which region an address is in, and how peers ask each other for their regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["Ints", "Regions", "Table", "Where"]

Ints = NDArray[np.int64]


class Where(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="w"):
    """Which memory have you registered?"""

    asker: str
    number: int


class Regions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="r"):
    """Part of the answer."""

    number: int
    part: int
    parts: int
    descs: list[bytes]


class Table:
    """Regions by address."""

    def __init__(self, entries: Sequence[tuple[int, int, Any]]) -> None:
        ordered = sorted(entries, key=lambda entry: entry[0])
        self.starts: Ints = np.array([start for start, _, _ in ordered], np.int64)
        self.ends: Ints = np.array([start + nbytes for start, nbytes, _ in ordered], np.int64)
        self.things = [thing for _, _, thing in ordered]

    def find(self, addresses: Ints, lengths: Ints) -> Ints:
        """Return which region each block is in, -1: in none."""
        if not self.things:
            return np.full(len(addresses), -1, np.int64)
        found: Ints = np.searchsorted(self.starts, addresses, side="right") - 1
        inside = (found >= 0) & (addresses + lengths <= self.ends[np.maximum(found, 0)])
        for i in np.nonzero(~inside)[0]:  # regions that overlap: one that begins earlier may reach farther
            wide = np.nonzero((self.starts <= addresses[i]) & (addresses[i] + lengths[i] <= self.ends))[0]
            found[i] = wide[0] if wide.size else -1
        return found
