"""Tokens on a GPU that travel through the engine, on a GPU: the bits of the reference, in graphs, among processes."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import nic_process
import pytest
import torch
from gpu_replay import Replay
from moe_cases import ROUTINGS, VIEWS, Case, run_steps
from moe_told import all_say

from fabric_core import BadRange, TransferEngine
from fabric_moe import MoeGroup, Table
from fabric_moe.gpu_nic.generation import NicGeneration
from fabric_moe.training import backward_config, moe_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or a torch without CUDA"),
]

TYPES = [
    ("bfloat16", 0), ("float16", 0), ("float32", 0), ("float8_e4m3fn", 4), ("float8_e5m2", 1), ("int8", 3),
    ("float4_e2m1", 8), ("uint8", 16),
]  # fmt: skip


def on_gpu(**shape: Any) -> Case:
    return Case(device="cuda:0", **{"more": {"timeout": 60.0}, **shape})


ROUTED = on_gpu(ranks=4, experts=10, topk=4, hidden=48, tokens=[9, 0, 17, 4])
SHAPES = [
    on_gpu(ranks=2, experts=5, topk=2, hidden=7168, tokens=[3, 200], dtype="float8_e4m3fn", scale_bytes=224),
    on_gpu(ranks=8, experts=256, topk=8, hidden=2880, tokens=[20]),
    on_gpu(ranks=3, experts=896, topk=16, hidden=16, tokens=[4, 5, 6], alignment=16),
    on_gpu(ranks=3, experts=160, topk=40, hidden=16, tokens=[4, 5, 6]),
    on_gpu(ranks=5, experts=3, topk=2, hidden=24, tokens=[7]),
    on_gpu(ranks=1, experts=4, topk=2, hidden=8, tokens=[300]),
    on_gpu(ranks=64, experts=64, topk=4, hidden=32, tokens=[3]),
    on_gpu(ranks=2, experts=16, topk=4, hidden=64, tokens=[3000, 1], view="compact"),
]


def any_shape(seed: int) -> Case:
    """A shape by chance; the same for the same seed."""
    dice = random.Random(1000 + seed)
    private = dice.choice([0, 1, 5, 128])
    return on_gpu(
        ranks=dice.randint(1, 9), experts=dice.randint(1, 40), topk=dice.randint(1, 9), hidden=dice.randint(1, 70),
        tokens=[dice.randint(0, 40) for _ in range(dice.randint(1, 6))],
        dtype=dice.choice(["bfloat16", "float32", "float8_e4m3fn", "int8"]), scale_bytes=dice.randint(0, 5),
        out_dtype=dice.choice(["bfloat16", "float16", "float32"]),
        wire_dtype=dice.choice([None, "bfloat16", "float32"]),
        routing=dice.choice(ROUTINGS), view=dice.choice(VIEWS), alignment=dice.randint(1, 9),
        weighted=dice.random() < 0.5, accumulate=dice.random() < 0.5, seed=seed,
        more={"depth": dice.randint(1, 3), "private_tokens": 0, "private_max": private, "timeout": 60.0},
    )  # fmt: skip


@pytest.fixture(scope="module")
def gpu_engines() -> Iterator[list[TransferEngine]]:
    with TransferEngine.open("cuda:0") as one, TransferEngine.open("cuda:0") as two:
        yield [one, two]


@pytest.fixture
def joined(gpu_engines: list[TransferEngine]) -> Iterator[Callable[[Case], list[MoeGroup]]]:
    """Opens the ranks of a case on this thread, over two engines.

    Set CUDA_MODULE_LOADING=EAGER: a module that is loaded while a kernel waits keeps `local` from copying.
    """
    made: list[MoeGroup] = []

    def join(case: Case) -> list[MoeGroup]:
        found = MoeGroup.open_many(
            gpu_engines, case.config, range(case.ranks), Table(), device=case.device, through="engine"
        )
        made.extend(found)
        assert all(isinstance(group.generation, NicGeneration) for group in found)
        return found

    yield join
    for group in made:
        group.close()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing(joined: Any, routing: str, view: str) -> None:
    case = Case(**{**vars(ROUTED), "routing": routing, "view": view})
    assert run_steps(case, joined(case), 3) == 12


@pytest.mark.parametrize(("dtype", "scale_bytes"), TYPES)
def test_every_type_in_every_view(joined: Any, dtype: str, scale_bytes: int) -> None:
    for view in VIEWS:
        case = on_gpu(
            ranks=3, experts=7, topk=3, hidden=34, tokens=[6, 11, 1], dtype=dtype, scale_bytes=scale_bytes, view=view,
            alignment=4, routing="minus-random",
        )  # fmt: skip
        assert run_steps(case, joined(case), 2) == 6


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: f"{c.ranks}x{c.experts}x{c.topk}x{c.hidden}")
def test_shapes(joined: Any, case: Case) -> None:
    assert run_steps(case, joined(case), 2) == 2 * case.ranks


@pytest.mark.parametrize("seed", range(16))
def test_any_shape(joined: Any, seed: int) -> None:
    case = any_shape(seed)
    assert run_steps(case, joined(case), 4) == 4 * case.ranks


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_graph_is_replayed_without_a_wrong_byte(joined: Any, ranks: int) -> None:
    """Each replay draws other tokens, other routing and another live count on the GPU; the host only sends."""
    replay = Replay(joined, ranks)
    assert replay.run(int(os.environ.get("FABRIC_MOE_REPLAYS", "1000"))) == 0
    assert replay.rows() > 0


def test_wrong_ids_are_said_once(joined: Any) -> None:
    case = on_gpu(ranks=2, experts=6, topk=2, hidden=16, tokens=[5])
    groups = joined(case)
    x = torch.ones((5, 16), dtype=torch.bfloat16, device="cuda:0")
    ids = torch.full((5, 2), 6, device="cuda:0")
    for group in groups:
        group.dispatch_send(x, ids)
    torch.cuda.synchronize()
    for group in groups:
        with pytest.raises(BadRange, match="named expert 6"):
            group.check()
        group.check()


def test_gradients(joined: Any) -> None:
    """A layer whose gradients travel the same way gives what the experts give without it."""
    case = on_gpu(ranks=1, experts=3, topk=2, hidden=16, tokens=[7], dtype="float32", out_dtype="float32")
    forward = joined(case)[0]
    back = MoeGroup.open(forward.engine, backward_config(case.config), 0, Table(), device="cuda:0", through="engine")
    with back:
        torch.manual_seed(1)
        experts = [torch.nn.Linear(16, 16, device="cuda:0") for _ in range(3)]
        x = torch.randn(7, 16, device="cuda:0", requires_grad=True)
        ids = torch.tensor([[0, 1], [2, -1], [1, 2], [0, 2], [1, 0], [2, 1], [-1, -1]], device="cuda:0")
        weights = torch.rand(7, 2, device="cuda:0", requires_grad=True)
        y = moe_layer(forward, back, experts)(x, ids, weights)
        y.square().sum().backward()
        found = (x.grad.clone(), weights.grad.clone(), experts[1].weight.grad.clone())
        for each in (x, weights, *(p for expert in experts for p in expert.parameters())):
            each.grad = None
        plain = torch.zeros_like(y)
        for e, expert in enumerate(experts):
            plain = plain + ((ids == e) * weights).sum(dim=1, keepdim=True) * expert(x)
        plain.square().sum().backward()
        assert torch.allclose(y, plain, atol=1e-5)
        for a, b in zip(found, (x.grad, weights.grad, experts[1].weight.grad), strict=True):
            assert torch.allclose(a, b, atol=1e-4)


# ---- processes ------------------------------------------------------------------------------------------------------


def started(processes: Any, case: Case) -> list[Any]:
    made = [processes(case, [rank], serve=nic_process.serve) for rank in range(case.ranks)]
    for process in made:
        process.hear("open")
    return made


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_share_a_gpu(processes: Any, ranks: int) -> None:
    case = on_gpu(ranks=ranks, experts=20, topk=4, hidden=64, tokens=[33, 2, 0, 64], routing="zipf")
    made = started(processes, case)
    all_say(made, "steps 0 6", "ok 6")
    for process in made:
        process.end()


def test_a_process_is_killed_and_the_others_go_on(processes: Any) -> None:
    """Between its dispatch and its receive: the kernels of the others name it, by their limit at the latest."""
    case = on_gpu(ranks=3, experts=9, topk=3, hidden=64, tokens=[13, 5, 9], more={"timeout": 20.0})
    made = started(processes, case)
    all_say(made, "steps 0 2", "ok 2")
    all_say(made, "half 2 1", "half")
    os.kill(made[2].pid, signal.SIGKILL)
    for process in made[:2]:
        process.tell("steps 3 3")
    for process in made[:2]:
        process.hear("lost 2 ")
    for process in made[:2]:
        process.tell("mask 2")
    for process in made[:2]:
        process.hear("masked")
    for process in made[:2]:
        process.tell("steps 5 4 2")
    for process in made[:2]:
        process.hear("ok 4")
