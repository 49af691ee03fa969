"""Calls of DeepEP's `Buffer` beside dispatch and combine: sizes, settings, events. Most have nothing to do here."""

from __future__ import annotations

from typing import Any

from fabric_moe.config import MoeConfig
from fabric_moe.deepep_parts import BLOCK, Event, Groups, Handle

__all__ = ["OtherCalls"]


class OtherCalls(Groups):
    """What engines call around dispatch and combine."""

    def get_next_low_latency_combine_buffer(self, handle: Handle) -> Any:
        """Return [E_l, R * max, H] bfloat16 for the experts' results. Nothing is saved by it here."""
        import torch

        config = handle.group.config
        shape = (len(config.experts_of(self.rank)), handle.room, config.hidden)
        return torch.zeros(shape, dtype=torch.bfloat16)

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens: int, hidden: int, ranks: int, experts: int) -> int:
        """Return the bytes that a rank registers for low latency with so many tokens of each rank, fp8 and top-8."""
        shape = MoeConfig(
            ranks=ranks, experts=experts, topk=8, hidden=hidden, max_tokens=tokens, dtype="float8_e4m3fn",
            scale_bytes=-(-hidden // BLOCK) * 4,
        )  # fmt: skip
        return shape.memory()["total"]

    def clean_low_latency_buffer(self, tokens: int, hidden: int, experts: int) -> None:
        """Nothing to clean: memory carries the number of its step."""

    @staticmethod
    def set_num_sms(sms: int) -> None:
        """No effect in host memory."""

    @staticmethod
    def get_dispatch_config(ranks: int) -> None:
        """Nothing is tuned by hand: `config=` takes it, and anything else."""

    @staticmethod
    def get_combine_config(ranks: int) -> None:
        """See get_dispatch_config."""

    @staticmethod
    def capture() -> Event:
        """Return an event of work that is over."""
        return Event()
