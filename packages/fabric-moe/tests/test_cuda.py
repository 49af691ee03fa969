"""The kernels on a GPU: every bit as the reference has it, in graphs, among processes, when a rank does not come."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest
import torch
from gpu_replay import Replay
from moe_cases import ROUTINGS, VIEWS, Case, run_steps
from moe_told import all_say, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or a torch without CUDA"),
]

ROUTED = Case(ranks=4, experts=10, topk=4, hidden=48, tokens=[9, 0, 17, 4], device="cuda:0")
PAIR = Case(ranks=2, experts=6, topk=2, hidden=16, tokens=[30], device="cuda:0")
TYPES = [
    ("bfloat16", 0), ("float16", 0), ("float32", 0), ("float8_e4m3fn", 4), ("float8_e5m2", 1), ("int8", 3),
    ("float4_e2m1", 8), ("uint8", 16),
]  # fmt: skip
SUMS = [("bfloat16", "float32"), ("float16", "float16"), ("float32", "bfloat16"), ("float32", "float32")]


def on_gpu(**shape: Any) -> Case:
    return Case(device="cuda:0", **shape)


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
    dice = random.Random(seed)
    return on_gpu(
        ranks=dice.randint(1, 9), experts=dice.randint(1, 40), topk=dice.randint(1, 9), hidden=dice.randint(1, 70),
        tokens=[dice.randint(0, 40) for _ in range(dice.randint(1, 6))],
        dtype=dice.choice(["bfloat16", "float32", "float8_e4m3fn", "int8"]), scale_bytes=dice.randint(0, 5),
        out_dtype=dice.choice(["bfloat16", "float16", "float32"]),
        wire_dtype=dice.choice([None, "bfloat16", "float32"]),
        routing=dice.choice(ROUTINGS), view=dice.choice(VIEWS), alignment=dice.randint(1, 9),
        weighted=dice.random() < 0.5, accumulate=dice.random() < 0.5, seed=seed, more={"depth": dice.randint(1, 3)},
    )  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing(opened: Any, routing: str, view: str) -> None:
    case = Case(**{**ROUTED.__dict__, "routing": routing, "view": view})
    assert run_steps(case, opened(case), 3) == 12


@pytest.mark.parametrize(("dtype", "scale_bytes"), TYPES)
def test_every_type_in_every_view(opened: Any, dtype: str, scale_bytes: int) -> None:
    for view in VIEWS:
        case = on_gpu(
            ranks=3, experts=7, topk=3, hidden=34, tokens=[6, 11, 1], dtype=dtype, scale_bytes=scale_bytes, view=view,
            alignment=4, routing="minus-random",
        )  # fmt: skip
        assert run_steps(case, opened(case), 2) == 6


@pytest.mark.parametrize(("out", "wire"), SUMS)
def test_sums(opened: Any, out: str, wire: str) -> None:
    for weighted in (True, False):
        for accumulate in (True, False):
            case = on_gpu(
                ranks=4, experts=4, topk=4, hidden=40, tokens=[12], out_dtype=out, wire_dtype=wire, weighted=weighted,
                accumulate=accumulate,
            )  # fmt: skip
            assert run_steps(case, opened(case), 2) == 8


@pytest.mark.parametrize("case", SHAPES, ids=lambda c: f"{c.ranks}x{c.experts}x{c.topk}x{c.hidden}")
def test_shapes(opened: Any, case: Case) -> None:
    assert run_steps(case, opened(case), 2) == 2 * case.ranks


@pytest.mark.parametrize("seed", range(12))
def test_any_shape(opened: Any, seed: int) -> None:
    case = any_shape(seed)
    assert run_steps(case, opened(case), 3) == 3 * case.ranks


# ---- graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_graph_is_replayed_without_a_wrong_byte(opened: Any, ranks: int) -> None:
    """Each replay draws other tokens, other routing and another live count on the GPU, and compares there."""
    replay = Replay(opened, ranks)
    assert replay.run(int(os.environ.get("FABRIC_MOE_REPLAYS", "2000"))) == 0
    assert replay.rows() > 0


def test_graphs_of_different_sizes_take_turns(opened: Any) -> None:
    """Two graphs and steps outside of them, in any order: slots are the graphs' own, epochs the GPU's."""
    case = on_gpu(ranks=2, experts=6, topk=2, hidden=16, tokens=[30], more={"depth": 3})
    groups = opened(case)
    stream = torch.cuda.Stream()
    sizes, made = (7, 30), []
    where = torch.device("cuda:0")
    inputs = [(torch.randn(n, 16, device=where).bfloat16(), torch.randint(0, 6, (n, 2), device=where)) for n in sizes]

    def step(x: Any, ids: Any) -> list[Any]:
        steps = [group.dispatch_send(x, ids) for group in groups]
        for group, one in zip(groups, steps, strict=True):
            view = group.dispatch_recv(one).contiguous()
            group.combine_send(view, view.tensor())
        return [group.combine_recv(one) for group, one in zip(groups, steps, strict=True)]

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step(*inputs[0])
        stream.synchronize()
        for given in inputs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                made.append((graph, step(*given)))
        for turn in (0, 1, 1, 0, 2, 0, 1, 2, 2, 1, 0):
            if turn < 2:
                inputs[turn][0].mul_(-1)  # each replay has other tokens
                made[turn][0].replay()
                out, x = made[turn][1], inputs[turn][0]
            else:
                x = torch.full((9, 16), 3.0, device=where).bfloat16()
                out = step(x, torch.zeros((9, 2), dtype=torch.int64, device=where))
            stream.synchronize()
            for found in out:
                assert torch.equal(found, (x.float() * 2).bfloat16()), turn
    for group in groups:
        group.check()


def test_live_is_read_when_the_kernel_runs(opened: Any) -> None:
    groups = opened(PAIR)
    live = torch.tensor([5], dtype=torch.int32, device="cuda:0")
    x = torch.ones((30, 16), dtype=torch.bfloat16, device="cuda:0")
    ids = torch.zeros((30, 2), dtype=torch.int64, device="cuda:0")
    steps = [group.dispatch_send(x, ids, live=live) for group in groups]
    live.fill_(30)  # on the same stream: the kernel has read it
    for group, step in zip(groups, steps, strict=True):
        view = group.dispatch_recv(step).contiguous()
        assert int(view.counts.sum()) == (20 if group.rank == 0 else 0)
        group.combine_send(view, torch.ones((view.rows, 16), dtype=torch.bfloat16, device="cuda:0"))
    for group, step in zip(groups, steps, strict=True):
        out = group.combine_recv(step)
        assert out[:5].eq(2).all()
        assert out[5:].eq(0).all()
        group.check()


# ---- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 8])
def test_processes_share_a_gpu(processes: Any, ranks: int) -> None:
    case = on_gpu(
        ranks=ranks, experts=20, topk=4, hidden=64, tokens=[33, 2, 0, 64], routing="zipf", more={"timeout": 60.0}
    )
    started = start(processes, case)
    all_say(started, "steps 0 6", "ok 6")
    for process in started:
        process.end()


def test_a_process_is_killed_and_the_others_go_on(processes: Any) -> None:
    """Between its dispatch and its receive: the kernels of the others give up in time, and name it."""
    case = on_gpu(ranks=3, experts=9, topk=3, hidden=64, tokens=[13, 5, 9], more={"timeout": 4.0})
    started = start(processes, case)
    all_say(started, "steps 0 2", "ok 2")
    all_say(started, "half 2 1", "half")
    os.kill(started[2].pid, signal.SIGKILL)
    for process in started[:2]:
        process.tell("steps 3 3")
    for process in started[:2]:
        answer = process.hear("lost")
        assert answer.split()[1] == "2", answer
    for process in started[:2]:
        process.tell("mask 2")
    for process in started[:2]:
        process.hear("masked")
    for process in started[:2]:
        process.tell("steps 5 4 2")
    for process in started[:2]:
        process.hear("ok 4")
