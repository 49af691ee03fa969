"""How a rank's memory is divided where tokens on GPUs travel through the engine: alike on all ranks.

Rows and sums lie in GPU memory, counts in host memory of the engine, words between kernels and proxy in pinned memory.
The first `private` rows of each source have a place of their own and leave at once; what is beyond follows when the
counts of all ranks are known, into memory that the sources share, each at its exact place.
"""

from __future__ import annotations

from dataclasses import dataclass

from fabric_core import ConfigError
from fabric_moe.config import MoeConfig

__all__ = ["LINE", "MAIL", "MAX_RANKS", "NicLayout"]

LINE = 64  #: bytes of a head: a cache line
MAX_RANKS = 64  #: a set of ranks is a word of 64 bits
MAIL = 4 * 16 * 6 + 8 * 16 + 16  #: bytes of `struct Mail` of words.cuh
LOCAL = 256  #: bytes of `struct Local`, with room
_MAX_EXPERTS = 8192  # counters of all experts lie in a block's shared memory
_MAX_TOPK = 128
_MAX_COPIES = 1 << 30  # kernels count them in 32 bits
_TYPES = {"bfloat16": 0, "float32": 1, "float16": 2}
_WARPS = 16


def _up(n: int, to: int = 16) -> int:
    return -(-n // to) * to


@dataclass(frozen=True, slots=True)
class NicLayout:
    """Offsets and sizes in bytes, unless they are counts; of one slot, unless they say otherwise."""

    config: MoeConfig
    private: int  #: rows that each source may send before the counts are known
    shared: int  #: rows of the shared memory
    scale_at: int
    meta_at: int
    row_bytes: int
    in_sums: int
    in_stride: int
    out_sums: int
    out_stride: int
    counts_stride: int  #: of what one rank tells another one
    counted_bytes: int  #: of that in pinned memory, for all ranks
    scratch: dict[str, int]  #: where each list of `words.cuh` begins
    scratch_stride: int

    @classmethod
    def of(cls, config: MoeConfig) -> NicLayout:
        """Divide the memory of one rank. Raises ConfigError for a shape that the kernels do not take."""
        limits = {"ranks": MAX_RANKS, "experts": _MAX_EXPERTS, "topk": _MAX_TOPK}
        for name, most in limits.items():
            if getattr(config, name) > most:
                raise ConfigError(f"{name}={getattr(config, name)}: on GPUs at most {most}; host memory takes more")
        for name, kind in (("out_dtype", config.out_dtype), ("wire_dtype", config.wire)):
            if kind not in _TYPES:
                raise ConfigError(f"{name}={kind!r}: GPUs make sums of {', '.join(_TYPES)}; host memory takes more")
        r, t, fan, k = config.ranks, config.max_tokens, config.fan_out, config.topk
        if t * k > _MAX_COPIES:
            raise ConfigError(f"max_tokens={t} with topk={k}: on GPUs at most {_MAX_COPIES} copies of a rank in a step")
        private = min(config.private_max, t)
        worst = r * (t - private)
        shared = worst if config.shared_rows is None else min(worst, config.shared_rows)
        held = -(-config.experts // r)
        scale_at = _up(config.token_bytes)
        meta_at = _up(scale_at + config.scale_bytes)
        row = _up(meta_at + 4 * (3 * k + 1), 32)
        comes, sent = r * private + shared, t * fan
        heads, most = LINE * r, comes * config.sum_bytes
        in_sums, out_sums = _up(comes * row, LINE), _up(sent * row, LINE)
        lists = {
            "MINE": 4 * (r + 1), "THEIRS": 4 * (r + 1), "LATE": 4 * r, "MASK": 8 * t, "IDS": 4 * t * k,
            "PLACE": 4 * t * k, "SEAT": 4 * sent, "TABLE": 4 * sent, "TAB": 4 * r * held,
        }  # fmt: skip
        scratch, at = {}, 0
        for name, size in lists.items():
            scratch[name] = at
            at += _up(size, LINE)
        made = cls(
            config, private, shared, scale_at, meta_at, row, in_sums,
            in_sums + _up(heads + sent * config.sum_bytes, LINE), out_sums, out_sums + _up(heads + most, LINE),
            _up(LINE + 4 * (r + held), LINE), _up(4 * r * (1 + held), LINE), scratch, at,
        )  # fmt: skip
        if made.in_stride >= 1 << 36:
            raise ConfigError(f"a slot of {made.in_stride} bytes: at most 64 GiB; lower max_tokens or shared_rows")
        return made

    @property
    def held(self) -> int:
        """Experts of the rank that has the most of them."""
        return -(-self.config.experts // self.config.ranks)

    @property
    def comes(self) -> int:
        """Rows that a rank can receive in a step."""
        return self.config.ranks * self.private + self.shared

    @property
    def plan_words(self) -> int:
        """Words of 32 bits that the view's kernels leave for combine about each row."""
        return 2 * self.config.topk

    @property
    def control_bytes(self) -> int:
        """Host memory that the others write: counts of all slots, and notes. What is sent is divided alike."""
        return self.config.depth * self.config.ranks * self.counts_stride + LINE * self.config.ranks

    @property
    def pinned_bytes(self) -> int:
        """Words between kernels and proxy, and the counts of all slots, ours and the others'."""
        return _up(MAIL, LINE) + 2 * self.config.depth * self.counted_bytes

    def counted_at(self, slot: int, theirs: bool = False) -> int:
        """Return where in pinned memory our counts lie; theirs: those of the others."""
        return _up(MAIL, LINE) + (2 * slot + theirs) * self.counted_bytes

    def count_shared(self) -> int:
        """Return the bytes of a block's memory that the kernel takes which counts."""
        return 4 * (self.config.experts + self.config.ranks * (1 + _WARPS))

    def arrive_shared(self, held: int) -> int:
        """Return the bytes of a block's memory that the kernel takes which waits for rows."""
        return 8 * (held + 1) + 4 * held

    def memory(self) -> dict[str, int]:
        """Return the bytes of GPU memory that a rank holds, by use, all `depth` steps together; "total" is their sum.

        With R ranks, T tokens, F ranks of a token, P private rows of a source and S shared ones:

            received   (R * P + S) * row          sending    T * F * row
            sums in    T * F * sum                sums out   (R * P + S) * sum
        """
        depth = self.config.depth
        found = {
            "received": self.in_sums * depth,
            "sums_in": (self.in_stride - self.in_sums) * depth,
            "sending": self.out_sums * depth,
            "sums_out": (self.out_stride - self.out_sums) * depth,
            "control": self.scratch_stride * depth + LOCAL,
        }
        found["total"] = sum(found.values())
        return found

    def macros(self) -> dict[str, int]:
        """Return what the kernels are compiled with."""
        c = self.config
        each, more = divmod(c.experts, c.ranks)
        return {
            "RANKS": c.ranks, "EXPERTS": c.experts, "EACH": each, "MORE": more, "HELD": self.held, "TOPK": c.topk,
            "FAN": c.fan_out, "HIDDEN": c.hidden, "MAX_TOKENS": c.max_tokens, "TOKEN_BYTES": c.token_bytes,
            "SCALE_BYTES": c.scale_bytes, "SCALE_AT": self.scale_at, "META_AT": self.meta_at,
            "ROW_BYTES": self.row_bytes, "SUM_BYTES": c.sum_bytes, "WIRE": _TYPES[c.wire], "OUT": _TYPES[c.out_dtype],
            "PRIVATE": self.private, "IN_SUMS": self.in_sums, "OUT_SUMS": self.out_sums,
            **{f"S_{name}": at for name, at in self.scratch.items()},
        }  # fmt: skip
