"""What arrived in a step, before it is put into an order: rows by source rank and token, each once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import ProtocolError
from fabric_moe import kernels
from fabric_moe.dtypes import Bytes
from fabric_moe.errors import StepError
from fabric_moe.step import RECEIVED

if TYPE_CHECKING:
    from fabric_moe.step import Step
    from fabric_moe.views import View

__all__ = ["Received"]


class Received:
    """The rows that a rank received in a step, N of them, ordered by source rank, then by token.

    `contiguous`, `masked`, `compact` and `rank_major` lay them out as experts like them. They copy out of the memory
    that peers write, so make them before `combine_send`.
    """

    def __init__(
        self, step: Step, rows: NDArray[np.void], slots: NDArray[np.int64] | None, starts: NDArray[np.int64]
    ) -> None:
        self.step = step
        self.starts = starts  #: [R + 1] where the rows of each source begin
        self._rows = rows
        self._slots = np.arange(len(rows)) if slots is None else slots
        bounds = step.generation.config.expert_bounds
        rank = step.generation.rank
        self.first_expert = int(bounds[rank])
        self.experts = int(bounds[rank + 1]) - self.first_expert  #: that this rank holds
        ids = rows["ids"][self._slots]
        mine = (ids >= self.first_expert) & (ids < self.first_expert + self.experts)
        #: [N, k] which of this rank's experts each row is for, counted from 0; -1 elsewhere
        self.local_ids: NDArray[np.int32] = np.where(mine, ids - self.first_expert, -1).astype(np.int32)
        self.weights: NDArray[Any] = rows["weights"][self._slots]  #: [N, k]
        #: [experts] how many rows each of this rank's experts computes
        self.counts: NDArray[np.int64] = np.bincount(self.local_ids[mine], minlength=self.experts)

    def __len__(self) -> int:
        return len(self._slots)

    def check_stamps(self, stamp: int) -> None:
        """Raise ProtocolError if a row is not of this step."""
        stamps = self._rows["stamp"][self._slots]
        if (wrong := np.nonzero(stamps != stamp)[0]).size:
            source = int(np.searchsorted(self.starts, wrong[0], side="right")) - 1
            raise ProtocolError(
                f"a row of rank {source} carries step {int(stamps[wrong[0]])}, this is step {stamp}: memory was "
                "written out of turn"
            )

    def sources(self) -> NDArray[np.int64]:
        """Return [N] the rank that each row came from."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def fill(self, index: NDArray[np.int64], tokens: Bytes, scales: Bytes) -> None:
        """Copy rows out: tokens[i] is row index[i], zeros where that is negative."""
        if self.step.state != RECEIVED:
            raise StepError(
                f"{self.step!r}: its rows are in memory that the others may write again; make views before combine_send"
            )
        at = np.where(index >= 0, self._slots[np.maximum(index, 0)], -1) if len(self._slots) else index
        kernels.gather(self._rows["token"], at, tokens)
        if scales.shape[1]:
            kernels.gather(self._rows["scales"], at, scales)

    def contiguous(self, alignment: int = 1) -> View:
        """Rows grouped by expert, a row for each of its experts here; see `views.contiguous`."""
        from fabric_moe import views

        return views.contiguous(self, alignment)

    def masked(self, capacity: int | None = None) -> View:
        """[experts, capacity] rows and how many of them count; see `views.masked`."""
        from fabric_moe import views

        return views.masked(self, capacity)

    def compact(self) -> View:
        """Each row once, unsorted, with the local ids of its experts; see `views.compact`."""
        from fabric_moe import views

        return views.compact(self)

    def rank_major(self, capacity: int | None = None) -> View:
        """[ranks, capacity] rows by source, with a list of row numbers for each expert; see `views.rank_major`."""
        from fabric_moe import views

        return views.rank_major(self, capacity)
