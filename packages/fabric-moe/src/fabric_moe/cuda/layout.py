"""How a rank's GPU memory is divided, and the macros that tell the kernels. Alike on all ranks: the shape is.

A rank keeps `max_tokens` rows for each other rank (a slab), so nobody asks for a place; sums come back into
`max_tokens` x fan-out rows, in the order of tokens and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from fabric_core import ConfigError
from fabric_moe.config import MoeConfig

__all__ = ["MAX_RANKS", "GpuLayout"]

MAX_RANKS = 64  #: a set of ranks is a word of 64 bits
_MAX_EXPERTS = 8192  #: counters of all experts lie in a block's shared memory
_MAX_TOPK = 128
_LINE = 128
_THREADS = 512  # of a block, as in common.cuh
_MANY = 192  # blocks that keep a GPU busy
_LOCAL = 512  # bytes of `struct Local` in common.cuh, with room
_TYPES = {"bfloat16": 0, "float32": 1, "float16": 2}


def _up(n: int, to: int = 16) -> int:
    return -(-n // to) * to


def _most_marks(ranks: int) -> int:
    """Return how many marks of each rank a block can look at: four by each thread that does not look at words."""
    return 4 * (_THREADS - _up(ranks, 32)) // ranks // 4 * 4


@dataclass(frozen=True, slots=True)
class GpuLayout:
    """Offsets in bytes within a slot of the memory that peers write; each slot is there `depth` times."""

    config: MoeConfig
    scale_at: int
    row_bytes: int
    meta_bytes: int
    in_row_flags: int
    in_sum_flags: int
    in_counts: int
    in_meta: int
    in_rows: int
    in_sums: int
    in_stride: int
    in_notes: int
    in_bytes: int  #: of all slots
    local_bytes: int  #: of what only this rank uses

    @classmethod
    def of(cls, config: MoeConfig) -> GpuLayout:
        """Divide the memory of one rank. Raises ConfigError for a shape that the kernels do not take."""
        limits = {"ranks": MAX_RANKS, "experts": _MAX_EXPERTS, "topk": _MAX_TOPK}
        for name, most in limits.items():
            if getattr(config, name) > most:
                raise ConfigError(f"{name}={getattr(config, name)}: on GPUs at most {most}; host memory takes more")
        for name, kind in (("out_dtype", config.out_dtype), ("wire_dtype", config.wire)):
            if kind not in _TYPES:
                raise ConfigError(f"{name}={kind!r}: GPUs make sums of {', '.join(_TYPES)}; host memory takes more")
        r, t = config.ranks, config.max_tokens
        scale_at = _up(config.token_bytes)
        row, meta = _up(scale_at + config.scale_bytes), _up(4 * (3 * config.topk + 1), 32)  # whole sectors
        sum_flags = cls._told(r, cls._row_parts(config))
        counts = sum_flags + cls._told(r, cls._sum_parts(config))
        in_meta = counts + _up(4 * r * cls._held(config), _LINE)
        rows = in_meta + _up(r * t * meta, _LINE)
        sums = rows + _up(r * t * row, _LINE)
        stride = sums + _up(t * config.fan_out * config.sum_bytes, _LINE)
        notes = stride * config.depth
        return cls(
            config, scale_at, row, meta, 0, sum_flags, counts, in_meta, rows, sums, stride, notes,
            notes + _up(8 * r, _LINE), _LOCAL + _up(8 * r, _LINE) + config.depth * _up(t, _LINE),
        )  # fmt: skip

    @staticmethod
    def _held(config: MoeConfig) -> int:
        return -(-config.experts // config.ranks)

    @staticmethod
    def _row_parts(config: MoeConfig) -> int:
        most, tokens = _most_marks(config.ranks), config.max_tokens
        return _up(tokens, 4) if tokens <= most else 0

    @staticmethod
    def _sum_parts(config: MoeConfig) -> int:
        most, rows = _most_marks(config.ranks), config.ranks * config.max_tokens
        return _up(rows, 4) if rows <= most else most if most >= _MANY and rows <= 8 * most else 0

    @staticmethod
    def _told(ranks: int, parts: int) -> int:
        return _up(_up(8 * ranks) + 4 * ranks * parts, _LINE)

    @property
    def row_parts(self) -> int:
        """Marks of one source for rows, beside a word of its last block: one for each other block of dispatch_send that
        serves a rank. There are no more of them. 0: none, the block that ends last writes the word.
        """
        return self._row_parts(self.config)

    @property
    def sum_parts(self) -> int:
        """Marks of one source for sums, likewise, beside a word of the first block of combine_send."""
        return self._sum_parts(self.config)

    @property
    def plan_words(self) -> int:
        """Words of 32 bits that dispatch_recv leaves for combine_send about each row."""
        return 2 * self.config.topk + 2

    @property
    def held(self) -> int:
        """Experts of the rank that has the most of them."""
        return self._held(self.config)

    @property
    def most_shared(self) -> int:
        """Bytes of a block's memory that the kernels need at least, whatever the tokens: see halves.py."""
        return max(self.send_shared(1), self.recv_shared(self.held))

    def send_shared(self, each: int) -> int:
        """Return the bytes of a block's memory that dispatch_send takes with `each` tokens of a block."""
        c = self.config
        return 8 * (each + c.ranks) + 4 * (c.experts + c.ranks + 3 * each * c.topk + 2 * each * c.fan_out)

    def recv_shared(self, held: int) -> int:
        """Return the bytes of a block's memory that dispatch_recv takes on a rank with `held` experts."""
        return 4 * (self.config.ranks * (held + 1) + 2 * held + 1)

    @property
    def peers_at(self) -> int:
        """Where the addresses of all ranks lie in a rank's own memory, behind `struct Local`."""
        return _LOCAL

    def turns_at(self, slot: int) -> int:
        """Return where it is noted to how many ranks each token of a slot went."""
        return _LOCAL + _up(8 * self.config.ranks, _LINE) + slot * _up(self.config.max_tokens, _LINE)

    def memory(self) -> dict[str, int]:
        """Return the bytes of GPU memory that a rank holds, by use, all `depth` steps together; "total" is their sum.

        With R ranks, T tokens, F ranks of a token: received = R * T * (row + meta), sums = T * F * sum.
        """
        found = {
            "received": (self.in_sums - self.in_meta) * self.config.depth,
            "sums": (self.in_stride - self.in_sums) * self.config.depth,
            "control": self.in_meta * self.config.depth + self.in_bytes - self.in_notes + self.local_bytes,
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
            "SCALE_BYTES": c.scale_bytes, "SCALE_AT": self.scale_at, "ROW_BYTES": self.row_bytes,
            "META_BYTES": self.meta_bytes, "SUM_BYTES": c.sum_bytes, "WIRE": _TYPES[c.wire],
            "OUT": _TYPES[c.out_dtype], "IN_ROW_FLAGS": self.in_row_flags, "IN_SUM_FLAGS": self.in_sum_flags,
            "IN_COUNTS": self.in_counts, "IN_META": self.in_meta, "IN_ROWS": self.in_rows, "IN_SUMS": self.in_sums,
            "IN_STRIDE": self.in_stride, "IN_NOTES": self.in_notes, "ROW_PARTS": self.row_parts,
            "SUM_PARTS": self.sum_parts,
        }  # fmt: skip
