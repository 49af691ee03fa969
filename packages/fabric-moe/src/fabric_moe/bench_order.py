"""What `fabric moe bench` asks of each rank's process."""

from __future__ import annotations

from dataclasses import dataclass

from fabric_moe.config import MoeConfig

__all__ = ["PHASES", "Order"]

PHASES = ("dispatch send", "dispatch recv", "view", "combine send", "combine recv")


@dataclass(frozen=True, slots=True)
class Order:
    """A run, the same for all ranks."""

    config: MoeConfig
    board: str
    backend: str
    steps: int
    warmup: int
    seed: int
