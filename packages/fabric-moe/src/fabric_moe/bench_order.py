"""What `fabric moe bench` asks of each rank's process."""

from __future__ import annotations

from dataclasses import dataclass

from fabric_moe.config import MoeConfig
from fabric_moe.gate import Limit

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
    gate: Limit | None = None  #: of which groups a token's experts are; None: of all
    in_c: bool = True  #: whether the proxy sends; False: Python, as where it was not built
