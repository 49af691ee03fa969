"""The report of an update: one JSON object for each."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["UpdateReport"]


class UpdateReport(BaseModel):
    """How an update ended, and what it took. Seconds from the first offer; bytes on the wire, scales left out."""

    model_config = ConfigDict(extra="forbid")

    version: int
    committed: bool
    reason: str = ""  #: why not; or, if committed, what went wrong at the ranks in `culprits`
    culprits: list[str] = []
    seconds: float = 0.0
    times: dict[str, float] = {}  #: when all had offered, were ready, had transferred, had committed
    bytes: int = 0
    receivers: list[int] = []  #: that serve it
