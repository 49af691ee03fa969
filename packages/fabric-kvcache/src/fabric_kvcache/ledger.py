"""What of a request was pushed at a prefill rank, and what is left."""

from __future__ import annotations

from collections.abc import Sequence

from fabric_core import BadRange
from fabric_kvcache.coverage import Coverage

__all__ = ["Ledger"]


class Ledger:
    """Tokens `start` to `total` of some layers, and a tail. The caller guards it."""

    def __init__(self, layers: Sequence[int], start: int, total: int, *, tail: bool) -> None:
        self.start = start
        self.total = total
        self.covered = {layer: Coverage() for layer in layers}
        self.open_layers = set(layers)
        self._claims: dict[int, set[tuple[int, int]]] = {layer: set() for layer in layers}  # of words that are watched
        self.tail_left = tail  #: wanted, and not pushed

    def __contains__(self, layer: int) -> bool:
        """Whether this rank is to push that layer."""
        return layer in self.covered

    def add(self, layer: int, first: int, end: int) -> None:
        """A part of a layer is about to be pushed. Raises BadRange if it was before; then nothing has changed."""
        if self._claimed(layer, first, end):
            raise BadRange(f"tokens {first}..{end} of layer {layer}: a word that is watched pushes them")
        self.covered[layer].add(first, end)

    def _claimed(self, layer: int, first: int, end: int) -> bool:
        return any(a < end and first < b for a, b in self._claims[layer])

    def claim(self, parts: Sequence[tuple[int, int, int]]) -> bool:
        """Parts (layer, first, end) are to be pushed by a word's steps. False: not all can be; nothing has changed."""
        own = {layer: Coverage() for layer in self.covered}
        for layer, first, end in parts:
            taken = own[layer].overlaps(first, end) or self.covered[layer].overlaps(first, end)
            if taken or self._claimed(layer, first, end):
                return False
            own[layer].add(first, end)
        for layer, first, end in parts:
            self._claims[layer].add((first, end))
        return True

    def redeem(self, layer: int, first: int, end: int) -> None:
        """A part that was claimed has been pushed."""
        self._claims[layer].discard((first, end))
        self.covered[layer].add(first, end)

    def unclaim(self, parts: Sequence[tuple[int, int, int]]) -> None:
        """Parts are pushed by no word any more."""
        for layer, first, end in parts:
            self._claims.get(layer, set()).discard((first, end))

    def close(self, layer: int) -> bool:
        """Whether that layer is whole; afterwards it is not looked for any more."""
        whole = self.covered[layer].gap(self.start, self.total) is None
        if whole:
            self.open_layers.discard(layer)
        return whole

    @property
    def whole(self) -> bool:
        return not self.open_layers and not self.tail_left

    def unpushed(self) -> str:
        """Name the first thing that is left; "" if nothing is."""
        for layer in sorted(self.open_layers):
            return f"token {self.covered[layer].gap(self.start, self.total)} of layer {layer}"
        return "the tail" if self.tail_left else ""
