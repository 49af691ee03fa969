"""Four ways to lay out what was received. Each knows the way back: `combine_send` takes the view and its results.

Rows that hold no token are zero, never what lay there before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange
from fabric_moe.dtypes import Bytes, to_torch
from fabric_moe.received import Received

if TYPE_CHECKING:
    from fabric_moe.step import Step

__all__ = ["View", "compact", "contiguous", "masked", "rank_major"]


@dataclass(slots=True)
class View:
    """Received rows in some order. `rows` counts them flat, as `combine_send` wants its results."""

    received: Received
    kind: str  #: "contiguous", "masked", "compact" or "rank-major"
    shape: tuple[int, ...]  #: of the rows: (rows,) or (groups, capacity)
    tokens: Bytes  #: [*shape, token bytes]
    scales: Bytes  #: [*shape, scale bytes]
    counts: NDArray[np.int64]  #: rows of each expert; rank-major: of each source rank
    offsets: NDArray[np.int64]  #: where each group begins, flat, and the end
    source: NDArray[np.int64]  #: [rows] number of the received row, -1 for padding
    #: [N, k] where the result of each expert of each received row lies; None: the caller sums a row's experts itself
    positions: NDArray[np.int64] | None = None
    where: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  #: [N] then: where the row lies
    local_ids: NDArray[np.int32] | None = None  #: [*shape, k] for views that hold each row once
    weights: NDArray[Any] | None = None  #: [*shape, k] likewise
    #: rank-major: flat row numbers by expert, those of expert e from expert_offsets[e] on
    expert_rows: NDArray[np.int64] | None = None
    expert_offsets: NDArray[np.int64] | None = None

    @property
    def step(self) -> Step:
        """The step that it belongs to."""
        return self.received.step

    @property
    def rows(self) -> int:
        """Rows with padding."""
        return len(self.source)

    def tensor(self) -> Any:
        """Return the tokens as a torch tensor of the group's type, [*shape, hidden], over the same memory."""
        flat = to_torch(self.tokens.reshape(self.rows, self.tokens.shape[-1]), self.step.generation.config.dtype)
        return flat.reshape(*self.shape, flat.shape[1])


def _sorted(received: Received) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return (row, slot of its top-k, place within its expert) of all copies, by expert, then by row, then by slot."""
    flat = received.local_ids.ravel()
    copies = np.nonzero(flat >= 0)[0]
    order = copies[np.argsort(flat[copies], kind="stable")]
    begins = np.concatenate([[0], np.cumsum(received.counts)])[:-1]
    place = np.arange(len(order)) - np.repeat(begins, received.counts)
    k = received.local_ids.shape[1]
    return order // k, order % k, place


def _laid_out(received: Received, shape: tuple[int, ...], source: NDArray[np.int64]) -> tuple[Bytes, Bytes]:
    config = received.step.generation.config
    tokens = np.empty((len(source), config.token_bytes), np.uint8)
    scales = np.empty((len(source), config.scale_bytes), np.uint8)
    received.fill(source, tokens, scales)
    return tokens.reshape(*shape, config.token_bytes), scales.reshape(*shape, config.scale_bytes)


def contiguous(received: Received, alignment: int = 1) -> View:
    """Group rows by expert; each group begins at a multiple of `alignment` rows. Raises BadRange below 1."""
    if alignment < 1:
        raise BadRange(f"alignment={alignment!r}: at least 1 row")
    padded = -(-received.counts // alignment) * alignment
    offsets = np.concatenate([[0], np.cumsum(padded)])
    row, slot, place = _sorted(received)
    at = np.repeat(offsets[:-1], received.counts) + place
    source = np.full(int(offsets[-1]), -1, np.int64)
    source[at] = row
    positions = np.full(received.local_ids.shape, -1, np.int64)
    positions[row, slot] = at
    shape = (len(source),)
    tokens, scales = _laid_out(received, shape, source)
    return View(received, "contiguous", shape, tokens, scales, received.counts, offsets, source, positions)


def masked(received: Received, capacity: int | None = None) -> View:
    """Give each expert `capacity` rows, of which the first counts[e] hold tokens.

    Default capacity: what the fullest expert needs. Raises BadRange if an expert has more than the capacity given.
    """
    most = int(received.counts.max(initial=0))
    size = most if capacity is None else int(capacity)
    if size < most:
        e = int(received.counts.argmax())
        raise BadRange(
            f"expert {received.first_expert + e} has {most} rows, capacity is {size}: raise it, or take contiguous()"
        )
    row, slot, place = _sorted(received)
    at = np.repeat(np.arange(received.experts) * size, received.counts) + place
    source = np.full(received.experts * size, -1, np.int64)
    source[at] = row
    positions = np.full(received.local_ids.shape, -1, np.int64)
    positions[row, slot] = at
    shape = (received.experts, size)
    tokens, scales = _laid_out(received, shape, source)
    offsets = np.arange(received.experts + 1) * size
    return View(received, "masked", shape, tokens, scales, received.counts, offsets, source, positions)


def compact(received: Received) -> View:
    """Each received row once, by source and token. The caller computes and sums the experts in `local_ids` itself."""
    n = len(received)
    index = np.arange(n)
    tokens, scales = _laid_out(received, (n,), index)
    return View(
        received, "compact", (n,), tokens, scales, received.counts, np.array([0, n]), index, None, index,
        received.local_ids, received.weights,
    )  # fmt: skip


def rank_major(received: Received, capacity: int | None = None) -> View:
    """Give each source rank `capacity` rows, and each expert a list of flat row numbers. Otherwise as `compact`.

    Default capacity: `max_tokens` of the group. Raises BadRange if a source sent more.
    """
    config = received.step.generation.config
    size = config.max_tokens if capacity is None else int(capacity)
    counts = np.diff(received.starts)
    if (most := int(counts.max(initial=0))) > size:
        raise BadRange(f"rank {int(counts.argmax())} sent {most} rows, capacity is {size}: raise it")
    at = received.sources() * size + np.arange(len(received)) - np.repeat(received.starts[:-1], counts)
    source = np.full(config.ranks * size, -1, np.int64)
    source[at] = np.arange(len(received))
    shape = (config.ranks, size)
    tokens, scales = _laid_out(received, shape, source)
    local = np.full((len(source), config.topk), -1, np.int32)
    local[at] = received.local_ids
    weights = np.zeros((len(source), config.topk), received.weights.dtype)
    weights[at] = received.weights
    row, _, _ = _sorted(received)
    return View(
        received, "rank-major", shape, tokens, scales, counts, np.arange(config.ranks + 1) * size, source, None, at,
        local.reshape(*shape, -1), weights.reshape(*shape, -1),
        at[row], np.concatenate([[0], np.cumsum(received.counts)]),
    )  # fmt: skip
