"""What loaders do besides copying: to the destination, to bits, to one of several weights of one tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import pytest

from fabric_rlweights.meta import EngineTable, Shard, TrainerTable
from fabric_rlweights.plan import make_plan
from fabric_rlweights.record import Recorder
from fabric_rlweights.tables import destination, holdings

torch = pytest.importorskip("torch")

PARAMS = {"q": ((8, 64), "bfloat16"), "k": ((4, 64), "bfloat16"), "other": ((4, 64), "bfloat16")}


def record(load: Callable[[Any, str, Any], None]) -> EngineTable:
    """The table of a fused tensor and a plain one, where `load(part of qkv, name, weight)` loads q and k."""
    model = {"qkv": torch.zeros(12, 64, dtype=torch.bfloat16), "other": torch.zeros(4, 64, dtype=torch.bfloat16)}
    with Recorder(PARAMS) as recorder:
        for name, weight in recorder.weights():
            if name == "other":
                model["other"].copy_(weight)
            else:
                load(model["qkv"][:8] if name == "q" else model["qkv"][8:], name, weight)
    table = recorder.table(0, model)
    shards = tuple(
        Shard(param=n, shape=s, dtype=d, start=(0, 0), size=s, buffer=i, offset=0, strides=(128, 2))
        for i, (n, (s, d)) in enumerate(PARAMS.items())
    )
    params, held = holdings([TrainerTable(rank=0, shards=shards)])
    make_plan(params, held, destination([table], params))  # it can be planned, whatever falls back
    assert "other" not in table.fallback
    return table


def scaled(part: Any, name: str, weight: Any) -> None:
    part.copy_(weight)
    if name == "q":
        part.mul_(0.5)


def turned(part: Any, name: str, weight: Any) -> None:
    part.copy_(weight)
    if name == "q":
        part.copy_(part.flip(0))


def indexed(part: Any, name: str, weight: Any) -> None:
    part.copy_(weight)
    if name == "q":
        part[torch.tensor([1, 0])] = part[:2].clone()


def out_of(part: Any, name: str, weight: Any) -> None:
    part.copy_(weight)
    if name == "q":
        torch.neg(part.clone(), out=part)


def computed(part: Any, name: str, weight: Any) -> None:
    part.copy_(weight * 2 if name == "q" else weight)


def added(part: Any, name: str, weight: Any) -> None:
    part.copy_(weight)
    if name == "q":
        part.add_(weight)


def converted(part: Any, name: str, weight: Any) -> None:
    part.copy_(weight.view(torch.int16) if name == "q" else weight)


@pytest.mark.parametrize("load", [scaled, turned, indexed, out_of, computed, added, converted])
def test_what_is_no_mere_copy_falls_back_with_its_whole_tensor(load: Callable[[Any, str, Any], None]) -> None:
    table = record(load)
    assert set(table.fallback) == {"q", "k"}
    assert "shares qkv with q" in table.fallback["k"]
    assert [tensor.name for tensor in table.tensors] == ["other"]


def as_bits(part: Any, name: str, weight: Any) -> None:
    part.view(torch.int16).copy_(weight.view(torch.int16))


def as_bytes(part: Any, name: str, weight: Any) -> None:
    half = part.shape[0] // 2
    for rows in (slice(0, half), slice(half, None)):
        part[rows].view(torch.uint8).copy_(weight[rows].view(torch.uint8))


def twice(part: Any, name: str, weight: Any) -> None:
    part.zero_()
    part.copy_(weight)
    part.copy_(weight)


@pytest.mark.parametrize("load", [as_bits, as_bytes, twice])
def test_views_as_other_types_on_both_sides_are_copies_of_bits(load: Callable[[Any, str, Any], None]) -> None:
    table = record(load)
    assert not table.fallback
    rows = sorted((e.param, e.start[0], e.size[0], e.size[1], e.at) for e in table.entries if e.tensor == "qkv")
    assert sum(row[2] for row in rows) == 12
    assert all(row[3] == 64 and row[4] == (row[1] + (8 if row[0] == "k" else 0), 0) for row in rows)
