"""An engine's own loaders, unchanged, are watched; what the table then says is what they do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import numpy as np
import pytest
from dry_run import carry_out, plan_of
from oracle import World, random_bits, shard

from fabric_rlweights.meta import TrainerTable
from fabric_rlweights.record import Recorder

torch = pytest.importorskip("torch")

PARAMS: dict[str, tuple[tuple[int, ...], str]] = {
    "q": ((8, 6), "bfloat16"),
    "k": ((4, 6), "bfloat16"),
    "v": ((4, 6), "bfloat16"),
    "experts.0.up": ((4, 6), "bfloat16"),
    "experts.1.up": ((4, 6), "bfloat16"),
    "heads": ((8, 6), "bfloat16"),
    "turned": ((6, 5), "bfloat16"),
    "embed": ((10, 6), "bfloat16"),
    "scaled": ((6,), "bfloat16"),
}


def tensors() -> dict[str, Any]:
    made = {
        "qkv": torch.zeros(8, 6),
        "w13": torch.zeros(2, 4, 6),
        "pairs": torch.zeros(2, 2, 6),
        "turned": torch.zeros(5, 6),
        "embed": torch.zeros(8, 6),
        "scaled": torch.zeros(6),
    }
    made = {name: tensor.bfloat16() for name, tensor in made.items()}
    made["head"] = made["embed"]  # tied
    return made


def load(model: dict[str, Any], name: str, weight: Any) -> None:
    """As engines do it, for tensor-parallel rank 1 of 2."""
    if name in ("q", "k", "v"):
        rows = {"q": 4, "k": 2, "v": 2}[name]
        at = {"q": 0, "k": 4, "v": 6}[name]
        model["qkv"].narrow(0, at, rows).copy_(weight.narrow(0, rows, rows))
    elif name.startswith("experts"):
        model["w13"][int(name.split(".")[1])].data.copy_(weight)
    elif name == "heads":  # every second row of each group: a reshape, then an index
        model["pairs"].copy_(weight.view(2, 4, 6)[:, 1::2])
    elif name == "turned":
        model["turned"].copy_(weight.t())
    elif name == "embed":  # rank 1 has 5 of 10 rows, the rest is padding
        model["embed"][:5].copy_(weight[5:])
    else:
        model["scaled"].copy_(weight * 2)


def test_what_was_recorded_is_what_the_loaders_do() -> None:
    rng = np.random.default_rng(0)
    whole = {name: (dtype, random_bits(rng, shape, dtype)) for name, (shape, dtype) in PARAMS.items()}
    model = tensors()
    with Recorder(PARAMS) as recorder:
        for name, weight in recorder.weights():
            load(model, name, weight)
    assert all(bool((tensor == 0).all()) for tensor in model.values())  # nothing was loaded
    table = recorder.table(0, model, keep={"embed": [((5, 0), (3, 6))]})
    assert set(table.fallback) == {"scaled"}
    assert "mul" in table.fallback["scaled"]
    for name, (_dtype, bits) in whole.items():
        load(model, name, torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
    buffers: list[Any] = []
    shards = tuple(
        shard(name, dtype, bits, (0,) * bits.ndim, bits.shape, buffers) for name, (dtype, bits) in whole.items()
    )
    world = World(whole, [TrainerTable(rank=0, shards=shards)], [buffers], [table])
    plan = plan_of(world)
    assert list(plan.destination.aliases.values()) == ["embed"]
    done = carry_out(world, plan)
    names = plan.destination.tensors.names
    for row, name in enumerate(names):
        want = whole["scaled"][1] if name == "fallback:scaled" else model[name].view(torch.int16).numpy()
        found = done.values(row).reshape(want.shape).view(np.int16)
        rows = slice(0, 5) if name == "embed" else slice(None)
        np.testing.assert_array_equal(found[rows], want.view(np.int16)[rows])
    assert "head" not in names
    assert plan.proof.left_alone == 18
