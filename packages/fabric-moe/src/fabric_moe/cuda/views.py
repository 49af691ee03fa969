"""What a rank received, as tensors on its GPU. Sizes are fixed when a view is made, so that a graph can hold it; how
many rows count is on the GPU too.

Making a view queues the kernel that waits for the tokens and lays them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabric_core import BadRange
from fabric_moe.dtypes import torch_dtype
from fabric_moe.errors import StepError
from fabric_moe.step import RECEIVED

if TYPE_CHECKING:
    from fabric_moe.cuda.halves import GpuStep

__all__ = ["KINDS", "GpuReceived", "GpuView"]

KINDS = {"contiguous": 0, "masked": 1, "compact": 2, "rank-major": 3}


@dataclass(slots=True)
class GpuView:
    """Received rows in some order, on the GPU. `rows` counts them flat, used or not, as `combine_send` wants results.

    Rows beyond those that count hold whatever was there, except the padding of `contiguous`, which is zero.
    """

    received: GpuReceived
    kind: str  #: "contiguous", "masked", "compact" or "rank-major"
    shape: tuple[int, ...]  #: of the rows: (rows,) or (groups, capacity)
    tokens: Any  #: [*shape, token bytes] uint8; rank-major: strided, in the memory that peers write
    scales: Any  #: [*shape, scale bytes] uint8, likewise
    counts: Any  #: [experts] int32: rows of each expert
    offsets: Any  #: [experts + 1] int64: where each expert's rows begin, and the end
    source_rows: Any  #: [R + 1] int32: where the rows of each source begin, through all that came; the last is all
    plan: Any  #: for combine_send
    local_ids: Any = None  #: [*shape, k] int32, -1 elsewhere, for views that hold each row once
    weights: Any = None  #: [*shape, k] float32 likewise
    expert_rows: Any = None  #: likewise: flat row numbers, those of expert e from offsets[e] on

    @property
    def step(self) -> GpuStep:
        """The step that it belongs to."""
        return self.received.step

    @property
    def rows(self) -> int:
        """Rows with padding and room."""
        rows = 1
        for n in self.shape:
            rows *= n
        return rows

    def tensor(self) -> Any:
        """Return the tokens as a tensor of the group's type, [*shape, hidden], over the same memory."""
        return self.tokens.view(torch_dtype(self.step.generation.config.dtype))


class GpuReceived:
    """The rows that a rank receives in a step. Make one view of it, before `combine_send`."""

    def __init__(self, step: GpuStep) -> None:
        self.step = step
        bounds = step.generation.config.expert_bounds
        rank = step.generation.rank
        self.first_expert = int(bounds[rank])
        self.experts = int(bounds[rank + 1]) - self.first_expert  #: that this rank holds

    @property
    def most_rows(self) -> int:
        """Rows that can arrive: every rank's every token."""
        config = self.step.generation.config
        return int(config.ranks * config.max_tokens)

    @property
    def most_copies(self) -> int:
        """Rows by expert that there can be, without padding."""
        config = self.step.generation.config
        return self.most_rows * min(config.topk, max(1, self.experts))

    def contiguous(self, alignment: int = 1, capacity: int | None = None) -> GpuView:
        """Rows grouped by expert, each group at a multiple of `alignment` rows.

        capacity: rows to make room for. Default: enough for any routing without the same expert twice in a token, which
        is much; if more come, the step fails with BadRange and the group is broken, on all ranks.
        """
        if alignment < 1:
            raise BadRange(f"alignment={alignment!r}: at least 1 row")
        room = self.most_copies + self.experts * (alignment - 1) if capacity is None else int(capacity)
        return self._view("contiguous", (room,), room, alignment)

    def masked(self, capacity: int | None = None) -> GpuView:
        """[experts, capacity] rows, of which the first counts[e] of each hold tokens. Default: what can arrive."""
        room = self.most_rows if capacity is None else int(capacity)
        return self._view("masked", (self.experts, room), room, 1)

    def compact(self, capacity: int | None = None) -> GpuView:
        """Each row once, by source and token, with local ids and weights; the caller sums a row's experts."""
        room = self.most_rows if capacity is None else int(capacity)
        return self._view("compact", (room,), room, 1)

    def rank_major(self) -> GpuView:
        """[ranks, max_tokens] rows by source, where they arrived: nothing is copied. Gone after `combine_send`."""
        config = self.step.generation.config
        return self._view("rank-major", (config.ranks, config.max_tokens), config.max_tokens, 1)

    def _view(self, kind: str, shape: tuple[int, ...], capacity: int, alignment: int) -> GpuView:
        import torch

        from fabric_moe.cuda import halves

        step, config = self.step, self.step.generation.config
        if step.state != RECEIVED:
            raise StepError(f"{step!r}: its rows are in memory that the others may write again; make views before")
        if capacity < 0:
            raise BadRange(f"capacity={capacity}: 0 rows or more")
        rows = 1
        for n in shape:
            rows *= n
        if rows >= 1 << 32:
            raise BadRange(f"a view of {rows} rows: at most {(1 << 32) - 1}; give capacity=")
        where = torch.device("cuda", step.generation.device.number)

        def fresh(dtype: Any, *size: int) -> Any:
            return torch.empty(size, dtype=dtype, device=where)

        if kind == "rank-major":
            tokens, scales = step.slabs()
        else:
            tokens = fresh(torch.uint8, *shape, config.token_bytes)
            scales = fresh(torch.uint8, *shape, config.scale_bytes)
        once = kind in ("compact", "rank-major")
        view = GpuView(
            self, kind, shape, tokens, scales,
            fresh(torch.int32, self.experts), fresh(torch.int64, self.experts + 1),
            fresh(torch.int32, config.ranks + 1),
            fresh(torch.int32, self.most_rows, step.generation.layout.plan_words),
            fresh(torch.int32, *shape, config.topk) if once else None,
            fresh(torch.float32, *shape, config.topk) if once else None,
            fresh(torch.int64, self.most_rows * config.topk) if once else None,
        )  # fmt: skip
        halves.lay_out(view, capacity, alignment)
        return view
