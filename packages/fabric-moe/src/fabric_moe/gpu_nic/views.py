"""What a rank received, as tensors on its GPU, where the tokens came through the engine.

Sizes are fixed when a view is made, so that a graph can hold it; how many rows count is on the GPU too. Making a view
queues the kernel that waits for the tokens, and the one that lays them out.
"""

from __future__ import annotations

from typing import Any

from fabric_core import BadRange
from fabric_moe.cuda.views import GpuReceived, GpuView
from fabric_moe.errors import StepError
from fabric_moe.step import RECEIVED

__all__ = ["NicReceived"]


class NicReceived(GpuReceived):
    """The rows that a rank receives in a step. Make one view of it, before `combine_send`. Views are copies."""

    @property
    def most_rows(self) -> int:
        """Rows that can arrive: every rank's every token, or what `shared_rows` has room for."""
        config = self.step.generation.config
        layout: Any = self.step.generation.layout
        return int(min(config.ranks * config.max_tokens, layout.comes))

    def _view(self, kind: str, shape: tuple[int, ...], capacity: int, alignment: int) -> GpuView:
        import torch

        from fabric_moe.gpu_nic import halves

        step, config = self.step, self.step.generation.config
        if step.state != RECEIVED or step.view is not None:
            raise StepError(f"{step!r}: one view is made of a step, before combine_send")
        if capacity < 0:
            raise BadRange(f"capacity={capacity}: 0 rows or more")
        rows = 1
        for n in shape:
            rows *= n
        if rows >= 1 << 32:
            raise BadRange(f"a view of {rows} rows: at most {(1 << 32) - 1}; give capacity=")
        where: Any = step.generation

        def fresh(dtype: Any, *size: int) -> Any:
            return torch.empty(size, dtype=dtype, device=where.place)

        once = kind in ("compact", "rank-major")
        view = GpuView(
            self, kind, shape, fresh(torch.uint8, *shape, config.token_bytes),
            fresh(torch.uint8, *shape, config.scale_bytes),
            fresh(torch.int32, self.experts), fresh(torch.int64, self.experts + 1),
            fresh(torch.int32, config.ranks + 1),
            fresh(torch.int32, self.most_rows, step.generation.layout.plan_words),
            fresh(torch.int32, *shape, config.topk) if once else None,
            fresh(torch.float32, *shape, config.topk) if once else None,
            fresh(torch.int64, self.most_rows * config.topk) if once else None,
        )  # fmt: skip
        halves.lay_out(view, capacity, alignment)
        return view
