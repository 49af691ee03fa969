"""What cannot be planned is refused with the names of both sides; documents go round, are compared and explained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import numpy as np
import pytest
from dry_run import plan_of
from oracle import World, place, plain, random_bits, shard
from typer.testing import CliRunner

from fabric_core import ConfigError
from fabric_rlweights.cli import rl_app
from fabric_rlweights.document import PlanDocument
from fabric_rlweights.job.model import Model, engine_table
from fabric_rlweights.meta import EngineTable, Entry, Quant, TrainerTable


def world(ranks: int = 2, replicas: int = 1, tp: int = 2) -> World:
    model = Model(hidden=32, layers=1, heads=4, kv_heads=2, head_dim=8, inner=32, vocab=33)
    rng = np.random.default_rng(0)
    params = {name: ("bfloat16", random_bits(rng, shape, "bfloat16")) for name, shape in model.shapes().items()}
    trainers, buffers = [], []
    for rank in range(ranks * replicas):
        own: list[Any] = []
        rows = []
        for name, (dtype, whole) in params.items():
            step = -(-whole.shape[0] // ranks)
            first = min(rank % ranks * step, whole.shape[0])
            size = (min(step, whole.shape[0] - first), *whole.shape[1:])
            rows.append(shard(name, dtype, whole, (first,) + (0,) * (whole.ndim - 1), size, own))
        trainers.append(TrainerTable(rank=rank, shards=tuple(rows)))
        buffers.append(own)
    return World(params, trainers, buffers, [engine_table(model, rank, tp) for rank in range(tp)])


def changed(table: EngineTable, **entry: Any) -> EngineTable:
    return table.model_copy(update={"entries": (table.entries[0].model_copy(update=entry), *table.entries[1:])})


def test_a_rank_that_is_lost_without_replica_is_an_error_that_says_what_is_missing() -> None:
    w = world()
    with pytest.raises(
        ConfigError, match=r"rank 0: model\.\S+ wants .* trainers hold \d+ \(without the lost ranks \[1\]\)"
    ):
        plan_of(w, without=frozenset({1}))
    assert 1 not in plan_of(world(replicas=2), without=frozenset({1})).trainers


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"param": "model.embed.weight"}, "model.embed.weight, which no trainer has"),
        ({"at": (1, 0)}, "leaves the tensor's"),
        ({"size": (16, 32)}, r"of \d+ elements \d+ are spoken for"),
        ({"start": (20, 0)}, "the parameter's shape is"),
        ({"tensor": "nowhere"}, "nowhere, which is not in the table"),
    ],
)
def test_a_wrong_entry_is_named(entry: dict[str, Any], text: str) -> None:
    w = world()
    w.engines[0] = changed(w.engines[0], **entry)
    with pytest.raises(ConfigError, match=text):
        plan_of(w)


def test_two_things_for_one_place_and_two_tensors_in_one_memory_are_refused() -> None:
    w = world()
    twice = w.engines[0].entries[2].model_copy(update={"param": "model.layers.0.self_attn.k_proj.weight"})
    w.engines[0] = w.engines[0].model_copy(update={"entries": (*w.engines[0].entries, twice)})
    with pytest.raises(ConfigError, match=r"two things go to one place|the parameter's shape is"):
        plan_of(w)
    w = world()
    here = [t.model_copy(update={"address": 4096 + 8 * i}) for i, t in enumerate(w.engines[0].tensors)]
    w.engines[0] = w.engines[0].model_copy(update={"tensors": tuple(here)})
    with pytest.raises(ConfigError, match="overlap in memory"):
        plan_of(w)


def test_strides_that_put_elements_on_each_other_are_refused() -> None:
    bits = random_bits(np.random.default_rng(0), (4, 64), "bfloat16")
    own: list[Any] = []
    trainer = TrainerTable(rank=0, shards=(shard("w", "bfloat16", bits, (0, 0), (4, 64), own),))
    tensor = plain("w", (4, 64), "bfloat16").model_copy(update={"strides": (64, 2)})
    engine = EngineTable(rank=0, tensors=(tensor,), entries=(place("w", "w", (0, 0), (4, 64), (0, 0)),))
    with pytest.raises(ConfigError, match="two elements on the same bytes"):
        plan_of(World({"w": ("bfloat16", bits)}, [trainer], [own], [engine]))


def test_replicas_share_the_load() -> None:
    plan = plan_of(world(ranks=2, replicas=3, tp=2))
    load = np.bincount(plan.trainer, weights=plan.nbytes)
    assert load.max() <= load.mean() + plan.nbytes.max()


def test_a_tensor_with_short_pieces_goes_to_staging_memory_and_says_why() -> None:
    bits = random_bits(np.random.default_rng(0), (64, 64), "bfloat16")
    own: list[Any] = []
    trainer = TrainerTable(rank=0, shards=(shard("w", "bfloat16", bits, (0, 0), (64, 64), own),))
    tensor = plain("w", (64, 64), "bfloat16").model_copy(update={"strides": (2 * 4, 2 * 64 * 4)})
    entry = Entry(param="w", start=(0, 0), size=(64, 64), tensor="w", at=(0, 0))
    plan = plan_of(
        World({"w": ("bfloat16", bits)}, [trainer], [own], [EngineTable(rank=0, tensors=(tensor,), entries=(entry,))])
    )
    assert plan.proof.bytes == {"direct": 0, "staging": 8192, "fallback": 0}
    assert "pieces of 2 bytes" in plan.destination.reasons["rank 0: w"]


def test_the_commands_plan_explain_and_diff(tmp_path: Path) -> None:
    w = world(replicas=2)
    trainers, engines = tmp_path / "trainers.json", tmp_path / "engines.json"
    trainers.write_text("[" + ",".join(t.model_dump_json() for t in w.trainers) + "]")
    engines.write_text("[" + ",".join(t.model_dump_json() for t in w.engines) + "]")
    run = CliRunner()
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    done = run.invoke(rl_app, ["plan", str(trainers), str(engines), "-o", str(a)])
    assert done.exit_code == 0, done.output
    assert "each of" in done.output
    assert "direct 100.0%" in done.output
    assert run.invoke(rl_app, ["plan", str(trainers), str(engines), "--without", "2", "-o", str(b)]).exit_code == 0
    same = run.invoke(rl_app, ["diff", str(a), str(a)])
    assert (same.exit_code, same.output.strip()) == (0, "the same routes")
    differs = run.invoke(rl_app, ["diff", str(a), str(b)])
    assert differs.exit_code == 1
    name = "model.layers.0.self_attn.k_proj.weight"
    done = run.invoke(rl_app, ["explain", name, "--plan", str(a), "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.output)["data"]
    assert data["fused_with"] == [name.replace("k_proj", "q_proj"), name.replace("k_proj", "v_proj")]
    assert {route["receiver"] for route in data["routes"]} == {0, 1}
    assert data["bytes"] == sum(int(np.prod(route["size"])) * 2 for route in data["routes"])
    assert all(route["replicas"] == 2 for route in data["routes"])
    wrong = run.invoke(rl_app, ["explain", name + "s", "--plan", str(a)])
    assert wrong.exit_code == 2
    engines.write_text("[{}]")
    bad = run.invoke(rl_app, ["plan", str(trainers), str(engines)])
    assert bad.exit_code == 2


def test_a_saved_plan_is_the_same_plan_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    document = PlanDocument.of(plan_of(world()))
    path = tmp_path / "plan.json"
    document.save(path)
    again = PlanDocument.read(path)
    assert again == document
    assert not document.diff(again)
    path.write_text(path.read_text()[:-5])
    with pytest.raises(ConfigError, match="is no plan"):
        PlanDocument.read(path)


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "int8"])
def test_what_has_not_the_same_fp8_bits_on_every_device_is_not_quantised(dtype: str) -> None:
    whole = random_bits(np.random.default_rng(0), (128, 128), dtype)
    buffers: list[Any] = []
    trainer = TrainerTable(rank=0, shards=(shard("w", dtype, whole, (0, 0), (128, 128), buffers),))
    tensors = (
        plain("w", (128, 128), "float8_e4m3fn", quant=Quant(scheme="block", scales="s")),
        plain("s", (1, 1), "float32"),
    )
    engine = EngineTable(rank=0, tensors=tensors, entries=(place("w", "w", (0, 0), (128, 128), (0, 0)),))
    with pytest.raises(ConfigError, match=rf"w wants w, quantised: it is {dtype}, only bfloat16, float16, float32"):
        plan_of(World({"w": (dtype, whole)}, [trainer], [buffers], [engine]))
