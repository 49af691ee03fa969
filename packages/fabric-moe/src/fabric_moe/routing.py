"""Who goes where: from each token's experts to one row for each (rank, token), and from all ranks' counts to places.

Everything here is arithmetic on numpy arrays, without a peer, so that sender and receiver cannot disagree: both compute
the same places from the same counts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange
from fabric_moe.config import MoeConfig
from fabric_moe.dtypes import is_torch

__all__ = ["Places", "Route", "Span", "route"]


def _host(x: Any, what: str) -> Any:
    if not is_torch(x):
        return x
    if str(x.device) != "cpu":
        raise BadRange(f"{what} is on {x.device}: this group was opened for host memory; give a CPU tensor")
    x = x.detach()
    return (x.float() if x.is_floating_point() and x.element_size() < 4 else x).numpy()  # numpy has no bfloat16


def _count(live: Any, total: int) -> int:
    """Return `live` as a number of tokens. Raises BadRange for what is none of 0 to `total`."""
    try:
        number = operator.index(live)
    except TypeError:
        number = -1
    if isinstance(live, bool) or not 0 <= number <= total:
        raise BadRange(f"live={live!r}: topk_ids has {total} tokens")
    return number


@dataclass(frozen=True, slots=True)
class Route:
    """The rows that one rank sends in a step. Rows are ordered by destination, then by token."""

    tokens: int  #: of this rank in this step
    token: NDArray[np.int64]  #: [M] number of the token in each row
    counts: NDArray[np.int64]  #: [R] rows for each rank
    starts: NDArray[np.int64]  #: [R + 1] where each rank's rows begin
    turn: NDArray[np.int64]  #: [M] 0 for a token's first (lowest) rank, 1 for its second, ...
    ids: NDArray[np.int32]  #: [T, k] experts as they travel: -1 for none
    weights: NDArray[Any]  #: [T, k]
    unreachable: int  #: ids that were left out because their rank is masked


def route(config: MoeConfig, ids: Any, weights: Any, live: int | None, alive: NDArray[np.bool_]) -> Route:
    """Plan a step from the experts of each token.

    Args:
        ids: [T, k] integers, T at most `max_tokens`, k at most `topk`; -1 is no expert; one named twice counts twice.
        weights: [T, k] numbers, or None for 1.
        live: only the first `live` tokens take part; None: all.
        alive: [R] ranks that take part; experts of the others are left out and counted.

    Raises BadRange, which names the token and the number that is wrong.
    """
    given = np.asarray(_host(ids, "topk_ids"))
    if given.ndim != 2 or given.dtype.kind not in "iu":
        raise BadRange(f"topk_ids is {given.dtype} of shape {given.shape}: integers [tokens, topk] are wanted")
    total = int(given.shape[0])
    tokens = total if live is None else _count(live, total)
    if tokens > config.max_tokens:
        raise BadRange(f"{tokens} tokens in one step, max_tokens is {config.max_tokens}: split them, or raise it")
    if given.shape[1] > config.topk:
        raise BadRange(f"{given.shape[1]} experts a token, topk is {config.topk}")
    bad = (given[:tokens] >= config.experts) | (given[:tokens] < -1)
    if bad.any():
        t, j = (int(i) for i in np.argwhere(bad)[0])
        raise BadRange(f"token {t} names expert {given[t, j]}: experts go from 0 to {config.experts - 1}, -1 is none")
    k = config.topk
    wanted = np.full((tokens, k), -1, np.int32)
    wanted[:, : given.shape[1]] = given[:tokens]
    scales = np.zeros((tokens, k), config.weight_type)
    if weights is None:
        scales[:, : given.shape[1]] = 1
    else:
        heavy = np.asarray(_host(weights, "topk_weights"))
        if heavy.shape != given.shape or heavy.dtype.kind not in "fiu":
            raise BadRange(f"topk_weights is {heavy.dtype} of shape {heavy.shape}: numbers of shape {given.shape}")
        scales[:, : given.shape[1]] = heavy[:tokens]

    plan = _in_c(config, wanted, alive)
    starts, token, turn, unreachable = _in_numpy(config, wanted, alive) if plan is None else plan
    return Route(tokens, token, np.diff(starts), starts, turn, wanted, scales, unreachable)


_Plan = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]


def _in_c(config: MoeConfig, wanted: NDArray[np.int32], alive: NDArray[np.bool_]) -> _Plan | None:
    """The same as `_in_numpy`; None where the C part was not built."""
    from fabric_moe import kernels  # which needs the types of this module

    if kernels.NATIVE is None:
        return None
    tokens, k = wanted.shape
    ranks, at = config.ranks, kernels.pointer
    starts = np.empty(ranks + 1, np.int64)
    token, turn = np.empty((2, tokens * min(k, ranks)), np.int64)
    unreachable: int = kernels.NATIVE.lib.moe_route(
        at(wanted, "int32_t"), tokens, k, config.experts, ranks, at(alive, "uint8_t"),
        at(starts, "int64_t"), at(token, "int64_t"), at(turn, "int64_t"),
    )  # fmt: skip
    rows = int(starts[-1])
    return starts, token[:rows], turn[:rows], unreachable


def _in_numpy(config: MoeConfig, wanted: NDArray[np.int32], alive: NDArray[np.bool_]) -> _Plan:
    """Return starts, token and turn of a Route, and how many ids were set to -1 since their rank is not alive."""
    tokens = len(wanted)
    owner = np.searchsorted(config.expert_bounds, wanted, side="right") - 1  # -1 stays -1: bounds begin with 0
    away = (wanted >= 0) & ~alive[owner]
    unreachable = int(away.sum())
    if unreachable:
        wanted[away] = -1
        owner[away] = -1
    hit = np.zeros((tokens, config.ranks + 1), np.bool_)
    np.put_along_axis(hit, owner, True, axis=1)  # -1: the last column, which is cut off
    hit = hit[:, : config.ranks]
    rank, token = np.nonzero(hit.T)
    counts = np.bincount(rank, minlength=config.ranks)
    starts = np.concatenate([[0], np.cumsum(counts)])
    turn = (np.cumsum(hit, axis=1) - 1)[token, rank]
    return starts, token, turn, unreachable


class Span(NamedTuple):
    """Rows of one source that lie side by side at a destination."""

    source: int
    first: int  #: number of the first one among the source's rows for that destination
    rows: int
    slot: int  #: where they lie in the destination's memory, in rows


class Places:
    """Where every row of a step lies at its destination: the same on all ranks, out of the counts of all ranks.

    The first `private[s]` rows of source s lie in memory that is kept for s. What is above goes, in the order of the
    sources, into memory that they share; it has `shared` rows, and if there are more they arrive in turns.
    """

    def __init__(self, counts: NDArray[np.int64], private: NDArray[np.int64], private_max: int, shared: int) -> None:
        """counts: [R, R], rows from s for d. private: [R], of each source, at most private_max."""
        self.counts = counts
        self.private = private
        self._private_max = private_max
        self._shared = shared
        above = np.maximum(counts - private[:, None], 0)
        self._begin = np.cumsum(above, axis=0) - above  # [s, d]: how many of other sources come before
        self._above = above

    def turns(self, d: int) -> int:
        """Return how often the shared memory of d is filled, at least 1."""
        return max(1, -(-int(self._above[:, d].sum()) // self._shared))

    def early(self, s: int, d: int) -> Span | None:
        """Return the private rows from s at d."""
        rows = min(int(self.counts[s, d]), int(self.private[s]))
        return Span(s, 0, rows, s * self._private_max) if rows else None

    def late(self, s: int, d: int, turn: int) -> Span | None:
        """Return the rows from s that are in the shared memory of d at its `turn`."""
        begin, rows = int(self._begin[s, d]), int(self._above[s, d])
        low = max(begin, turn * self._shared)
        high = min(begin + rows, (turn + 1) * self._shared)
        if low >= high:
            return None
        slot = len(self.private) * self._private_max + low - turn * self._shared
        return Span(s, int(self.private[s]) + low - begin, high - low, slot)

    def arriving(self, d: int, turn: int) -> Iterator[Span]:
        """Return what arrives at d until its shared memory was filled for the `turn`-th time, and not before."""
        for s in range(len(self.private)):
            if turn == 0 and (span := self.early(s, d)):
                yield span
            if span := self.late(s, d, turn):
                yield span

    def writes(self, d: int) -> int:
        """Return how many writes carry the rows that arrive at d, if all arrive in one turn."""
        early = np.minimum(self.counts[:, d], self.private) > 0
        return int(early.sum()) + int((self._above[:, d] > 0).sum())

    def slots(self, d: int) -> NDArray[np.int64]:
        """Return where each row for d lies, by source and number, if all arrive in one turn."""
        counts = self.counts[:, d]
        source = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
        private = self.private[source]
        late = len(counts) * self._private_max + self._begin[source, d] + number - private
        return np.where(number < private, source * self._private_max + number, late)
