"""How a rank's registered memory is divided: alike on all ranks, since the shape is, so no offsets are exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_moe.config import MoeConfig

__all__ = ["HEAD", "HEAD_TYPE", "MAGIC", "NOTE_TYPE", "Inbound", "Layout", "Outbound"]

HEAD = 64  #: bytes of a head, a credit or a note: a cache line, so that no two peers write into one
MAGIC = 0x464D4F45  # "FMOE"

#: In front of counts and of sums: which step of which generation this is. Written with what it belongs to.
HEAD_TYPE = np.dtype(
    {
        "names": ["magic", "generation", "step", "rank", "private", "turn", "flags"],
        "formats": ["<u4", "<u4", "<u8", "<u4", "<u4", "<u4", "<u4"],
        "offsets": [0, 4, 8, 16, 20, 24, 28],
        "itemsize": HEAD,
    }
)
MAX_CULPRITS = 8

#: What a rank leaves with the others when it gives up: because of whom.
NOTE_TYPE = np.dtype(
    {
        "names": ["magic", "generation", "step", "count", "ranks"],
        "formats": ["<u4", "<u4", "<u8", "<u4", ("<u4", (MAX_CULPRITS,))],
        "offsets": [0, 4, 8, 16, 20],
        "itemsize": HEAD,
    }
)


def _up(n: int) -> int:
    return -(-n // HEAD) * HEAD


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in bytes. `in_*` is memory that the others write, `out_*` what is sent; each is there `depth` times."""

    config: MoeConfig
    counts_stride: int
    in_rows: int
    in_sums: int
    in_credits: int
    in_stride: int
    in_notes: int
    in_bytes: int
    out_rows: int
    out_sums: int
    out_credits: int
    out_stride: int
    out_note: int
    out_bytes: int

    @classmethod
    def of(cls, config: MoeConfig) -> Layout:
        """Divide the memory of one rank."""
        r = config.ranks
        counts_stride = HEAD + _up(4 * r)
        in_rows = counts_stride * r
        in_sums = in_rows + _up((r * config.private_max + config.shared) * config.row_bytes)
        in_credits = in_sums + _up(HEAD * r + config.max_tokens * config.fan_out * config.sum_bytes)
        in_stride = in_credits + HEAD * r
        in_notes = in_stride * config.depth
        out_rows = counts_stride
        out_sums = out_rows + _up(config.max_tokens * config.fan_out * config.row_bytes)
        out_credits = out_sums + _up(HEAD * r + config.stage_rows * config.sum_bytes)
        out_stride = out_credits + HEAD * r
        out_note = out_stride * config.depth
        return cls(
            config, counts_stride, in_rows, in_sums, in_credits, in_stride, in_notes, in_notes + HEAD * r,
            out_rows, out_sums, out_credits, out_stride, out_note, out_note + HEAD,
        )  # fmt: skip

    def counts_at(self, slot: int, source: int) -> int:
        """Return where a source's counts lie at every other rank."""
        return slot * self.in_stride + source * self.counts_stride

    def row_at(self, slot: int, row: int) -> int:
        """Return where a row of the receiving memory lies."""
        return slot * self.in_stride + self.in_rows + row * self.config.row_bytes

    def sums_at(self, slot: int, source: int, rows_before: int) -> int:
        """Return where the block of sums from `source` begins: a head, then its rows."""
        return slot * self.in_stride + self.in_sums + HEAD * source + rows_before * self.config.sum_bytes

    def credit_at(self, slot: int, source: int) -> int:
        """Return where a source's credit lies."""
        return slot * self.in_stride + self.in_credits + HEAD * source

    def note_at(self, source: int) -> int:
        """Return where a source's note lies."""
        return self.in_notes + HEAD * source


class Inbound:
    """Arrays over the memory that the others write."""

    def __init__(self, layout: Layout, memory: Any) -> None:
        c, r = layout.config, layout.config.ranks

        def over(dtype: Any, shape: tuple[int, ...], at: int, strides: tuple[int, ...]) -> NDArray[Any]:
            return np.ndarray(shape, dtype, memory, at, strides)

        self.memory = memory
        self.bytes = np.frombuffer(memory, np.uint8)
        step, line = layout.in_stride, layout.counts_stride
        self.heads = over(HEAD_TYPE, (c.depth, r), 0, (step, line))  #: [slot, source]
        self.counts = over("<u4", (c.depth, r, r), HEAD, (step, line, 4))  #: [slot, source, destination]
        rows = r * c.private_max + c.shared
        self.rows = over(c.row_type, (c.depth, rows), layout.in_rows, (step, c.row_bytes))  #: [slot, row]
        self.credits = over(HEAD_TYPE, (c.depth, r), layout.in_credits, (step, HEAD))
        self.notes = over(NOTE_TYPE, (r,), layout.in_notes, (HEAD,))

    def head_at(self, at: int) -> Any:
        """Return the head at an offset."""
        return np.ndarray((), HEAD_TYPE, self.memory, at)


class Outbound:
    """Arrays over the memory that is sent."""

    def __init__(self, layout: Layout, memory: Any) -> None:
        c, r = layout.config, layout.config.ranks
        step = layout.out_stride
        self.memory = memory
        self.bytes = np.frombuffer(memory, np.uint8)
        self.heads = np.ndarray((c.depth,), HEAD_TYPE, memory, 0, (step,))
        self.counts = np.ndarray((c.depth, r), "<u4", memory, HEAD, (step, 4))
        rows = c.max_tokens * c.fan_out
        self.rows = np.ndarray((c.depth, rows), c.row_type, memory, layout.out_rows, (step, c.row_bytes))
        self.credits = np.ndarray((c.depth, r), HEAD_TYPE, memory, layout.out_credits, (step, HEAD))
        self.note = np.ndarray((), NOTE_TYPE, memory, layout.out_note)
