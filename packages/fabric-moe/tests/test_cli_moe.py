"""`fabric moe`: what it prints is what it computed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fabric_core.sim_predict import predict
from fabric_moe import bench
from fabric_moe.cli import moe_app
from fabric_moe.simulate import KERNELS, PUBLISHED, Way, simulate, table_checks, targets

WAYS: tuple[Way, ...] = ("expert", "rank", "node")


def invoke(*words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(moe_app, list(words))
    assert done.exit_code == code, done.output
    return done


def test_bench_runs_and_compares() -> None:
    done = invoke(
        "bench",
        "--ranks",
        "2",
        "--tokens",
        "8",
        "--hidden",
        "256",
        "-n",
        "6",
        "--warmup",
        "1",
        "--private",
        "2",
        "--json",
    )
    report = json.loads(done.stdout)
    assert report["schema"] == "fabric.moe.bench/1"
    (run,) = report["data"]["runs"]
    assert run["private_tokens"] == 2
    assert run["late_rows"] > 0
    assert run["wrong"] == 0
    assert run["compared"] == 2 * 7 * 8
    assert run["combine_least_bytes"] < run["combine_bytes"]
    assert run["dispatch_least_bytes"] < run["copies_bytes"]
    assert {phase["name"] for phase in run["phases"]} >= {"dispatch", "combine", "view"}


def test_bench_with_experts_of_some_groups_and_without_the_proxy() -> None:
    """A group of experts on each rank, and each token's are of one: it goes to one rank."""
    shape = ["--ranks", "2", "--tokens", "8", "--hidden", "256", "-n", "4", "--warmup", "1"]
    done = invoke("bench", *shape, "--groups", "2", "--most-groups", "1", "--no-proxy", "--json")
    data = json.loads(done.stdout)["data"]
    assert (data["groups"], data["most_groups"]) == (2, 1)
    (run,) = data["runs"]
    assert not run["in_c"]
    assert run["wrong"] == 0
    assert run["dispatch_least_bytes"] == 8 * 256 * 2
    assert "groups=3: experts=16 must be a multiple" in invoke("bench", "--groups", "3", code=2).output


def test_bench_shows_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong token is counted, shown, and the exit code is 1."""
    phase = bench.Phase(name="dispatch", p50_us=1, p90_us=2, p99_us=3, p999_us=4)
    numbers: dict[str, Any] = dict.fromkeys(bench.Figures.model_fields, 1) | {"phases": [phase], "wrong": 3}
    monkeypatch.setattr(bench, "run", lambda *_, **__: bench.Figures(**numbers))
    done = invoke("bench", "--private", "0", "--private", "4", code=1)
    assert done.stdout.splitlines()[0].split()[-1] == "WRONG"
    assert [line.split()[-1] for line in done.stdout.splitlines()[1:3]] == ["3", "3"]


def test_a_rank_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "rank 0 failed: ConfigError" in invoke("bench", "--ranks", "1", "--backend", "nonsense", code=3).output


def test_a_preset_that_is_none() -> None:
    assert "decode, prefill, small" in invoke("bench", "--preset", "huge", code=2).output
    assert "no NIC is called" in invoke("simulate", "--nic", "x", code=2).output
    assert "expert, rank and node" in invoke("simulate", "--way", "x", code=2).output


def test_shapes_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "machine_memory", lambda: 1000)
    words = r"3 ranks register \d+ bytes, this machine has 1000: lower --ranks or --tokens"
    assert re.search(words, " ".join(invoke("bench", "--ranks", "3", code=2).output.split()))
    monkeypatch.undo()
    words = "topk=8 of experts=4: a token's experts are drawn without repetition"
    assert words in " ".join(invoke("bench", "--preset", "decode", "--experts", "4", code=2).output.split())
    assert "seed" in invoke("bench", "--seed", "-1", code=2).output
    assert "ranks=12: a multiple of the 8 ranks of a node" in invoke("simulate", "--ranks", "12", code=2).output
    invoke("simulate", "--ranks", "12", "--node", "4", "--nic", "cx7")
    assert (
        "a node without experts"
        in invoke("simulate", "--preset", "small", "--ranks", "64", "--way", "node", code=2).output
    )


def test_more_ranks_than_experts() -> None:
    """Each token goes to topk ranks at most, and to no fewer bytes than that; there is no once per node."""
    data = json.loads(invoke("simulate", "--preset", "small", "--ranks", "64", "--nic", "cx7", "--json").stdout)["data"]
    by_way = {one["way"]: one for one in data["answers"]}
    assert set(by_way) == {"expert", "rank"}
    assert by_way["rank"]["combine_bytes"] == by_way["expert"]["combine_bytes"]


def test_simulate_prints_what_it_predicts() -> None:
    done = invoke("simulate", "--nic", "cx7", "--ranks", "64", "--way", "expert", "--json")
    data = json.loads(done.stdout)["data"]
    assert data["answers"] == [simulate("cx7", 64, way="expert").model_dump()]
    assert data["kernels"]["first"] == KERNELS["paper"].first
    assert "64     expert" in invoke("simulate", "--nic", "cx7", "--ranks", "64").stdout


def test_posting_is_that_of_the_papers_tables() -> None:
    checks = table_checks()
    assert len(checks) == 4
    assert all(abs(check.off_percent) < 13 for check in checks)


@pytest.mark.parametrize(("key", "least", "most"), [("cx7", -5, 20), ("efa-p5en", -35, 5)])
def test_published_latencies_are_met_by_the_papers_own_way(key: str, least: float, most: float) -> None:
    """Nothing is fitted to these: kernel times and NIC costs come from other figures of the paper."""
    for (shape, nic, ranks), (dispatch, combine) in PUBLISHED.items():
        if nic == key:
            found = simulate(nic, ranks, shape=shape, way="expert")
            for value, published in ((found.dispatch_us, dispatch), (found.combine_us, combine)):
                assert least < 100 * (value / published - 1) < most, (shape, nic, ranks)


def test_fewer_bytes_are_faster_and_never_below_the_limit() -> None:
    for ranks in (16, 64):
        expert, rank, node = (simulate("cx7", ranks, way=way) for way in WAYS)
        assert expert.combine_us > rank.combine_us > node.combine_us
        for one in (expert, rank, node):
            assert one.wire_dispatch_us > one.least_dispatch_us
            assert one.wire_combine_us > one.least_combine_us


def test_distinct_targets_are_those_of_the_literature() -> None:
    assert targets(256, [32] * 8, 8) == pytest.approx(5.29, abs=0.01)
    assert targets(256, [4] * 64, 8) == pytest.approx(7.68, abs=0.01)
    assert targets(16, [1] * 16 + [0] * 48, 4) == pytest.approx(4)
    assert targets(3, [2, 1], 2) == pytest.approx(2 - 1 / 3)  # of the three pairs, one lies on the first alone


def test_the_wire_is_the_engine_s() -> None:
    """The combine of a simulated step is one scatter of the predictor, less the way of the completion back."""
    found = simulate("cx7", 64, way="rank")
    rows = 128 * targets(256, [4] * 64, 8) / 64
    wire = predict("cx7", "scatter", size=round(rows * 14336), peers=56).seconds - 5380e-9
    assert found.wire_combine_us == pytest.approx(wire * 1e6)


def test_memory_prints_the_formula() -> None:
    data = json.loads(invoke("memory", "--preset", "prefill", "--json").stdout)["data"]["bytes"]
    assert data["total"] == sum(value for name, value in data.items() if name != "total")
    assert data["total"] < 4e9


def test_the_table_of_the_docs_is_what_is_predicted() -> None:
    page = Path(__file__).parents[3] / "docs" / "moe.md"
    if not page.is_file():
        pytest.skip("the package stands alone")
    lines = re.findall(r"^\|[^|]*EP(\d+)[^|]*\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|$", page.read_text(), re.M)
    assert [int(line[0]) for line in lines] == [16, 32, 64, 128, 256]
    for ranks, published, *cells in lines:
        if published.strip() != "-":
            assert tuple(map(float, published.split("/"))) == PUBLISHED["decode", "cx7", int(ranks)]
        answers = [simulate("cx7", int(ranks), way=way) for way in WAYS]
        wanted = [(a.dispatch_us, a.combine_us) for a in answers]
        wanted.append((answers[1].least_dispatch_us, answers[1].least_combine_us))
        for cell, pair in zip(cells, wanted, strict=True):
            assert [float(number) for number in cell.split("/")] == pytest.approx(pair, abs=0.051)
