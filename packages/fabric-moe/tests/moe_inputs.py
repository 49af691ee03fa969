"""What ranks put into steps: shapes, routings, tokens. Made from a seed, a rank and a step, alike in every process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from fabric_moe import MoeConfig
from fabric_moe.reference import owner_of

ROUTINGS = (
    "uniform", "grouped", "one-expert", "one-rank", "local", "remote", "robin", "zipf", "k-hot", "one-each", "twice",
    "minus-random", "minus-second", "minus-rows", "minus-first", "minus-last", "minus-all",
)  # fmt: skip
VIEWS = ("contiguous", "masked", "compact", "rank-major")


@dataclass
class Case:
    """A group and what is done with it. `tokens` holds one number for each rank; shorter lists repeat."""

    ranks: int = 2
    experts: int = 4
    topk: int = 2
    hidden: int = 32
    tokens: list[int] = field(default_factory=lambda: [8])
    dtype: str = "bfloat16"
    scale_bytes: int = 0
    out_dtype: str = "bfloat16"
    wire_dtype: str | None = None
    routing: str = "uniform"
    view: str = "contiguous"
    alignment: int = 1
    weighted: bool = True
    accumulate: bool = False
    seed: int = 0
    device: str = "cpu"
    more: dict[str, Any] = field(default_factory=dict)  #: further values of MoeConfig

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Case:
        return cls(**json.loads(text))

    @property
    def config(self) -> MoeConfig:
        return MoeConfig(
            ranks=self.ranks, experts=self.experts, topk=self.topk, hidden=self.hidden, max_tokens=max(1, *self.tokens),
            dtype=self.dtype, scale_bytes=self.scale_bytes, out_dtype=self.out_dtype, wire_dtype=self.wire_dtype,
            **{"timeout": 20.0, **self.more},
        )  # fmt: skip

    def count(self, rank: int, step: int) -> int:
        """Tokens of a rank, which change from step to step."""
        most = self.tokens[rank % len(self.tokens)]
        return max(0, most - (step * 3 + rank) % (most + 1)) if step else most


@dataclass
class Given:
    """What one rank gives in one step."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None
    added: torch.Tensor


def _ids(case: Case, rank: int, t: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    e, k, name = case.experts, case.topk, case.routing
    every = np.arange(e)
    home = np.array([owner_of(i, e, case.ranks) for i in range(e)])

    def distinct(pool: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        row = np.full(k, -1)
        chosen = rng.permutation(pool)[:k]
        row[: len(chosen)] = chosen
        return row

    ids = np.array([distinct(every) for _ in range(t)]).reshape(t, k)
    if name == "grouped":
        half = np.array_split(every, 2)
        ids = np.array([distinct(half[rng.integers(2)]) for _ in range(t)]).reshape(t, k)
    elif name == "one-expert":
        ids[:] = -1
        ids[:, 0] = e - 1
    elif name in ("one-rank", "local", "remote"):
        target = {"one-rank": home == home[-1], "local": home == rank, "remote": home != rank}[name]
        ids = np.array([distinct(every[target]) for _ in range(t)]).reshape(t, k)
    elif name == "robin":
        ids = (np.arange(t * k) + rank).reshape(t, k) % e
    elif name == "zipf":
        ids = np.minimum(rng.zipf(1.5, (t, k)) - 1, e - 1)
    elif name == "k-hot":
        ids = np.array([distinct(every[: max(1, min(k, e // 2))]) for _ in range(t)]).reshape(t, k)
    elif name == "one-each":
        flat = np.full(t * k, -1)
        mine = every[every % case.ranks == rank][: t * k]
        flat[: len(mine)] = mine
        ids = flat.reshape(t, k)
    elif name == "twice":
        ids = np.repeat(rng.integers(0, e, (t, 1)), k, axis=1)
    elif name == "minus-random":
        ids[rng.random((t, k)) < 0.5] = -1
    elif name == "minus-second":
        ids[:, 1::2] = -1
    elif name == "minus-rows":
        ids[rng.random(t) < 0.5] = -1
    elif name == "minus-first":
        ids[:, 0] = -1
    elif name == "minus-last":
        ids[max(0, t - 3) :] = -1
    elif name == "minus-all":
        ids[:] = -1
    return ids


def _tokens(case: Case, t: int, rng: np.random.Generator) -> torch.Tensor:
    size = case.config.token_bytes
    if case.dtype in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64"):
        values = torch.from_numpy(rng.normal(0, 2, (t, case.hidden)))
        return values.to(getattr(torch, case.dtype))
    raw = torch.from_numpy(rng.integers(0, 256, (t, size), dtype=np.uint8))
    return (
        raw.view(torch.int8)
        if case.dtype == "int8" and t
        else raw.to(torch.int8 if case.dtype == "int8" else torch.uint8)
    )


def given(case: Case, rank: int, step: int) -> Given:
    """What a rank puts into a step."""
    rng = np.random.default_rng([case.seed, rank, step])
    t = case.count(rank, step)
    ids = torch.from_numpy(_ids(case, rank, t, rng).astype(np.int64))
    kind = torch.float64 if case.config.wire == "float64" else torch.float32
    weights = torch.from_numpy(rng.normal(0, 1, (t, case.topk))).to(kind)
    weights[weights.abs() < 0.1] = 0
    scales = None
    if case.scale_bytes:
        scales = torch.from_numpy(rng.integers(0, 256, (t, case.scale_bytes), dtype=np.uint8))
    added = torch.from_numpy(rng.normal(0, 1, (t, case.hidden))).to(getattr(torch, case.out_dtype))
    return Given(_tokens(case, t, rng), ids, weights, scales, added)
