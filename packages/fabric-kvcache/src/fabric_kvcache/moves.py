"""What a plan makes of a chunk: lists of equal pieces that `submit_paged_writes` takes as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fabric_core import Pages
from fabric_kvcache.pieces import Offsets, Pieces, merge

__all__ = ["Moves", "Part", "Run"]

_INDEX_END = 1 << 32  # the engine's page numbers are u32
_WORTH_A_SUBMIT = 8  # writes


@dataclass(frozen=True, slots=True)
class Strided:
    """Offsets as the engine wants them: offset + indices * stride."""

    indices: NDArray[np.uint32]
    stride: int
    offset: int

    @staticmethod
    def of(offsets: Offsets) -> Strided:
        least = int(offsets.min())
        rest = offsets - least
        stride = int(np.gcd.reduce(rest)) or 1
        return Strided((rest // stride).astype(np.uint32), stride, least)

    def pages(self, more: int) -> Pages:
        return Pages(self.indices, self.stride, self.offset + more)


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces of one length, in layer 0 of both pools."""

    length: int
    src: Strided
    dst: Strided


@dataclass(frozen=True, slots=True)
class Part:
    """Runs that are the same in some layers but for an offset per layer on each side."""

    runs: tuple[Run, ...]
    src_layer: dict[int, int]  #: model's layer -> bytes to add to the source's offsets
    dst_layer: dict[int, int]

    @staticmethod
    def make(pieces: Pieces, src_layer: dict[int, int], dst_layer: dict[int, int], *, merge: bool) -> Part:
        if merge:
            pieces = _even(_merge(pieces), len(pieces.length))
        runs: list[Run] = []
        for length in np.unique(pieces.length):
            chosen = pieces.length == length
            runs += _runs(int(length), pieces.src[chosen], pieces.dst[chosen])
        return Part(tuple(runs), src_layer, dst_layer)


_merge = merge


def _even(pieces: Pieces, most: int) -> Pieces:
    """Cut the few pieces that are several times as long as most are into pieces of that length, `most` pieces in all.

    Each length is a submit of its own, which takes the model's thread microseconds; a write more takes the engine a
    tenth of one. In random block tables a few neighbours meet.
    """
    if len(pieces.length) < 2:
        return pieces
    lengths, counts = np.unique(pieces.length, return_counts=True)
    usual = lengths[np.argmax(counts)]
    more = counts * (lengths // usual - 1)
    cut = lengths[(lengths > usual) & (lengths % usual == 0) & (more <= _WORTH_A_SUBMIT)]
    if not len(cut) or len(pieces.length) + more[np.isin(lengths, cut)].sum() > most:
        return pieces
    times = np.where(np.isin(pieces.length, cut), pieces.length // usual, 1)
    at = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)  # 0, 1, ... within each piece
    length = np.where(times > 1, usual, pieces.length)
    return Pieces(
        np.repeat(pieces.src, times) + at * usual, np.repeat(pieces.dst, times) + at * usual, np.repeat(length, times)
    )


def _runs(length: int, src: Offsets, dst: Offsets) -> Iterator[Run]:
    """Make one run, or several where numbers of 32 bits cannot reach from one end to the other."""
    made = [(offsets, Strided.of(offsets)) for offsets in (src, dst)]
    far = max((int(o.max()) - s.offset) // s.stride for o, s in made)
    if far < _INDEX_END:
        yield Run(length, made[0][1], made[1][1])
        return
    # Halve the side that reaches too far, at the middle of what it spans.
    wide = src if (int(src.max()) - int(src.min())) >= (int(dst.max()) - int(dst.min())) else dst
    low = wide < int(wide.min()) + (int(wide.max()) - int(wide.min()) + 1) // 2
    yield from _runs(length, src[low], dst[low])
    yield from _runs(length, src[~low], dst[~low])


@dataclass(frozen=True, slots=True)
class Moves:
    """All writes from one rank to another for one chunk."""

    parts: tuple[Part, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for part in self.parts for layer in part.src_layer}))

    @property
    def writes(self) -> int:
        """Of all layers; so often an immediate is raised."""
        return sum(len(run.src.indices) * len(part.src_layer) for part in self.parts for run in part.runs)

    @property
    def nbytes(self) -> int:
        return sum(run.length * len(run.src.indices) * len(part.src_layer) for part in self.parts for run in part.runs)

    def at(self, layer: int) -> list[tuple[int, Pages, Pages]]:
        """Return a layer's (length, source pages, destination pages), for one `submit_paged_writes` each."""
        return [
            (run.length, run.src.pages(part.src_layer[layer]), run.dst.pages(part.dst_layer[layer]))
            for part in self.parts
            if layer in part.src_layer
            for run in part.runs
        ]
