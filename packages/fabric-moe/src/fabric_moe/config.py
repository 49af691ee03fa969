"""What a group is made for: `MoeConfig`, the shape that all ranks must agree on, and the memory that it takes."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange, ConfigError
from fabric_moe.dtypes import bits_of, check_float

__all__ = ["MoeConfig", "machine_memory"]

_ALIGN = 16  #: of a row: whatever is in it may be loaded as vectors


def machine_memory() -> int:
    """Return the bytes of memory that this machine has; who takes more of it than that is killed, not refused."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


@lru_cache(maxsize=64)  # every step asks for these
def _row_type(token: int, scale: int, topk: int, kind: str) -> np.dtype[np.void]:
    names = ["token", "scales", "weights", "ids", "stamp"]
    formats = [(np.uint8, (token,)), (np.uint8, (scale,)), (kind, (topk,)), (np.int32, (topk,)), np.uint32]
    wide = np.dtype(kind).itemsize
    scales = _up(token, 4)
    weights = _up(scales + scale, wide)
    ids = weights + topk * wide
    stamp = ids + topk * 4
    offsets = [0, scales, weights, ids, stamp]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": _up(stamp + 4, _ALIGN)})


@lru_cache(maxsize=64)
def _expert_bounds(experts: int, ranks: int) -> NDArray[np.int64]:
    each, more = divmod(experts, ranks)
    sizes = np.full(ranks, each, np.int64)
    sizes[:more] += 1
    return np.concatenate([[0], np.cumsum(sizes)])


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The shape of a group, equal on all ranks; opening compares it. Numbers are counts unless they say bytes."""

    ranks: int  #: processes, or parts of processes, that hold experts and tokens
    experts: int  #: of all ranks together; need not be a multiple of `ranks`
    topk: int  #: experts of a token at most; fewer by ids of -1
    hidden: int  #: elements of a token
    max_tokens: int  #: of one rank in one step
    dtype: str = "bfloat16"  #: element type of the tokens that are dispatched
    scale_bytes: int = 0  #: bytes of scales that travel with each token
    out_dtype: str = "bfloat16"  #: of what combine returns
    wire_dtype: str | None = None  #: of the partial sums that travel back; default: `out_dtype`
    private_tokens: int = 32  #: rows that are sent to a rank before the counts of all ranks are known: where it starts
    private_max: int = 128  #: and where it ends; a rank keeps this many rows of memory for each other rank
    shared_rows: int | None = None  #: rows of memory for what is above; more arrive in turns. Default: see `shared`
    depth: int = 2  #: steps that may be between dispatch_send and the end of combine_recv
    timeout: float = 10.0  #: seconds that a receiving half waits for the other ranks

    def __post_init__(self) -> None:
        limits = {
            "ranks": (1, 65535),
            "experts": (1, 1 << 24),
            "topk": (1, 1024),
            "hidden": (1, 1 << 24),
            "max_tokens": (1, 1 << 24),
            "scale_bytes": (0, 1 << 20),
            "private_tokens": (0, 1 << 20),
            "private_max": (0, 1 << 20),
            "depth": (1, 16),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ConfigError(f"{name}={value!r}: must be an integer from {least} to {most}")
        if self.shared_rows is not None and not (
            isinstance(self.shared_rows, int) and 1 <= self.shared_rows <= 1 << 40
        ):
            raise ConfigError(f"shared_rows={self.shared_rows!r}: must be an integer from 1 on, or None")
        if not (isinstance(self.timeout, int | float) and 0 < self.timeout < 1e6):
            raise ConfigError(f"timeout={self.timeout!r}: must be a number of seconds above 0")
        if self.private_tokens > self.private_max:
            raise ConfigError(
                f"private_tokens={self.private_tokens} is more than private_max={self.private_max}: raise that too"
            )
        if self.hidden * bits_of(self.dtype) % 8:
            raise ConfigError(f"hidden={self.hidden} of {self.dtype}: a token must be a whole number of bytes")
        check_float("out_dtype", self.out_dtype)
        check_float("wire_dtype", self.wire)
        if (self.out_dtype == "float64") != (self.wire == "float64"):
            raise ConfigError(
                f"wire_dtype={self.wire!r} with out_dtype={self.out_dtype!r}: float64 is for both or none"
            )

    # ---- rows

    @property
    def wire(self) -> str:
        """Type of the partial sums that travel back."""
        return self.wire_dtype or self.out_dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token without its scales."""
        return self.hidden * bits_of(self.dtype) // 8

    @property
    def weight_type(self) -> type[np.generic]:
        """numpy type of the weights and of the sums: float32, or float64 if sums are carried in that."""
        return np.float64 if self.wire == "float64" else np.float32

    @property
    def row_type(self) -> np.dtype[np.void]:
        """A row as it travels: token, scales, the ids of all its experts, their weights, the step's number."""
        return _row_type(self.token_bytes, self.scale_bytes, self.topk, np.dtype(self.weight_type).str)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that is dispatched."""
        return int(self.row_type.itemsize)

    @property
    def sum_bytes(self) -> int:
        """Bytes of a row that comes back."""
        return _up(self.hidden * bits_of(self.wire) // 8, _ALIGN)

    # ---- experts

    @property
    def expert_bounds(self) -> NDArray[np.int64]:
        """Rank r holds the experts from bounds[r] up to bounds[r + 1]; the first `experts % ranks` hold one more."""
        return _expert_bounds(self.experts, self.ranks).copy()

    def experts_of(self, rank: int) -> range:
        """Return the numbers of the experts that a rank holds."""
        bounds = self.expert_bounds
        return range(int(bounds[rank]), int(bounds[rank + 1]))

    def members_with(self, rank: int, members: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of a generation in order, each once. Raises BadRange without `rank`, or beyond the group."""
        given = tuple(members)
        try:
            each = tuple(sorted({operator.index(member) for member in given}))
        except TypeError:
            raise BadRange(f"members={given}: numbers of ranks are integers") from None
        if rank not in each or not 0 <= each[0] <= each[-1] < self.ranks:
            raise BadRange(f"members={each}: they must hold rank {rank}, and lie below {self.ranks}")
        return each

    # ---- memory

    @property
    def fan_out(self) -> int:
        """Ranks that one token may go to."""
        return min(self.topk, self.ranks, self.experts)

    @property
    def shared(self) -> int:
        """Rows of memory for what goes beyond the private rows, never more than the worst case needs.

        Default: as many as a rank receives if the load is even and no token has two experts on one rank.
        """
        worst = self.ranks * max(0, self.max_tokens - self.private_tokens)
        even = self.max_tokens * self.fan_out
        return max(1, min(even if self.shared_rows is None else self.shared_rows, worst))

    @property
    def stage_rows(self) -> int:
        """Rows that a rank sends in a step, at most; of partial sums, those that are on their way at a time."""
        return self.max_tokens * self.fan_out

    def memory(self) -> dict[str, int]:
        """Return the bytes that a rank registers, by use, all `depth` steps together; "total" is their sum.

        With R ranks, T tokens, P private rows at most, S shared rows, F ranks of a token, row and sum bytes:

            received   (R * P + S) * row          sending    T * F * row
            sums in    T * F * sum                sums out   T * F * sum
        """
        fan, tokens = self.fan_out, self.max_tokens
        line = 64  # every part begins on a cache line
        head = line * self.ranks
        counts = line + _up(4 * self.ranks, line)
        one = {
            "received": _up((self.ranks * self.private_max + self.shared) * self.row_bytes, line),
            "sending": _up(tokens * fan * self.row_bytes, line),
            "sums_in": _up(tokens * fan * self.sum_bytes, line) + head,
            "sums_out": _up(self.stage_rows * self.sum_bytes, line) + head,
            "control": counts * (self.ranks + 1) + 2 * head,
        }
        found = {name: size * self.depth for name, size in one.items()}
        found["notes"] = line * (self.ranks + 1)
        found["total"] = sum(found.values())
        return found

    def differences(self, other: dict[str, object]) -> str:
        """Say where another rank's values differ from ours: "hidden is 64 there and 128 here"."""
        mine = asdict(self)
        words = [
            f"{f.name} is {other.get(f.name)!r} there and {mine[f.name]!r} here"
            for f in fields(self)
            if other.get(f.name) != mine[f.name]
        ]
        return ", ".join(words)
