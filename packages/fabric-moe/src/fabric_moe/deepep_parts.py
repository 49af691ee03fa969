"""What stands under the DeepEP facade: groups for each shape, handles, numbers as fp8 with scales."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Self

from fabric_core import TransferEngine
from fabric_moe.config import MoeConfig
from fabric_moe.errors import StepError
from fabric_moe.group import MoeGroup
from fabric_moe.meet import Board
from fabric_moe.step import DONE, RECEIVED

__all__ = ["BLOCK", "Event", "Groups", "Handle", "in_bytes", "padded", "to_fp8"]

BLOCK = 128  # numbers of a token that share a scale
_FP8_MAX = 448.0


class Event:
    """DeepEP's EventOverlap, of work that is over."""

    event = None

    def current_stream_wait(self) -> None:
        """Nothing to wait for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...


@dataclass(slots=True)
class Handle:
    """What `combine` needs of a dispatch. It may be dispatched with, or combined with, again: same routing."""

    group: MoeGroup
    step: Any
    ids: Any
    weights: Any
    experts: int
    room: int = 0  #: rows of each expert, low latency; 0: compact rows
    view: Any = None

    def take(self) -> Any:
        """Receive what was dispatched, and return its view."""
        received = self.group.dispatch_recv(self.step)
        self.view = received.masked(self.room) if self.room else received.compact()
        return self.view

    def revive(self) -> None:
        """Have a step to combine with: where that of the handle is over, the same rows travel once more, empty."""
        if self.step.state == RECEIVED:
            return
        if self.step.state != DONE:
            raise StepError(f"{self.step!r}: its tokens were not received: call the hook of its dispatch first")
        import torch

        config, tokens = self.group.config, len(self.ids)
        make_room(self.group)
        self.step = self.group.dispatch_send(
            torch.zeros((tokens, config.token_bytes), dtype=torch.uint8), self.ids, self.weights,
            scales=torch.zeros((tokens, config.scale_bytes), dtype=torch.uint8) if config.scale_bytes else None,
        )  # fmt: skip
        self.take()


def make_room(group: MoeGroup) -> None:
    """End the step whose memory comes next if its tokens were received and nobody has combined them.

    DeepEP has no such steps: there, a dispatch may stay without a combine. All ranks do this at the same call.
    """
    former = group.steps[group.next_step % group.config.depth]
    if former is not None and former.state == RECEIVED:
        group.discard(former)
        with contextlib.suppress(StepError):  # that it was discarded, by all ranks
            group.combine_recv(former)


class Groups:
    """The groups of one rank, opened at the first call with a shape, which all ranks make together."""

    def __init__(
        self, engine: TransferEngine, board: Board, rank: int, ranks: int, *, max_tokens: int = 4096,
        job: str = "deepep", timeout: float = 10.0,
    ) -> None:  # fmt: skip
        self._engine, self._board, self.rank, self.ranks = engine, board, rank, ranks
        self._max_tokens, self._job, self._timeout = max_tokens, job, timeout
        self._groups: dict[tuple[Any, ...], MoeGroup] = {}
        self._destroyed = False

    @property
    def group_size(self) -> int:
        """Ranks of the group."""
        return self.ranks

    def destroy(self) -> None:
        """Leave all groups. Idempotent."""
        self._destroyed = True
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy()

    def _group(
        self, experts: int, topk: int, x: Any, scales: Any, max_tokens: int, *, out: str = "bfloat16"
    ) -> MoeGroup:
        """Return the group for a shape, with memory for one more step."""
        if self._destroyed:
            raise StepError(f"the Buffer of rank {self.rank} was destroyed: make another one")
        size = 0 if scales is None else int(scales.shape[1]) * scales.element_size()
        kind = str(x.dtype).removeprefix("torch.")
        key = (experts, topk, int(x.shape[1]), kind, size, max_tokens, out)
        if key not in self._groups:
            config = MoeConfig(
                ranks=self.ranks, experts=experts, topk=topk, hidden=key[2], max_tokens=max_tokens, dtype=kind,
                scale_bytes=size, out_dtype=out, timeout=self._timeout,
            )  # fmt: skip
            name = f"{self._job}.{'.'.join(map(str, key))}"
            self._groups[key] = MoeGroup.open(self._engine, config, self.rank, self._board, job=name, device="cpu")
        make_room(self._groups[key])
        return self._groups[key]


def in_bytes(scales: Any) -> Any:
    """Return scales [T, blocks] as [T, bytes]."""
    if scales is None:
        return None
    import torch

    if not scales.numel():
        return torch.zeros((len(scales), int(scales.shape[1]) * scales.element_size()), dtype=torch.uint8)
    return scales.contiguous().view(torch.uint8)


def padded(rows: Any, room: int, value: int = 0) -> Any:
    """Return rows with further ones of `value`, `room` in all."""
    import torch

    if len(rows) == room:
        return rows
    out = torch.full((room, *rows.shape[1:]), value, dtype=rows.dtype)
    out[: len(rows)] = rows
    return out


def to_fp8(x: Any, round_scale: bool) -> tuple[Any, Any]:
    """Return x as fp8 with a scale for each 128 numbers of a token: x = fp8 * scale."""
    import torch

    blocks = x.float().reshape(len(x), x.shape[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax(2).clamp(1e-4) / _FP8_MAX
    if round_scale:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    return (blocks / scales[..., None]).reshape(x.shape).to(torch.float8_e4m3fn), scales
