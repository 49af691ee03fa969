"""`fabric rl bench`: the limit, the time under a watermark, and all ways leave the same bytes."""

from __future__ import annotations

import os

import pytest

from fabric_core import ConfigError
from fabric_rlweights.bench import bench, watermarks
from fabric_rlweights.bench_device import bench_device, setup_for
from fabric_rlweights.cli import bytes_of
from fabric_rlweights.job.launch import Setup
from fabric_rlweights.job.limit import KINDS, rates
from fabric_rlweights.job.model import Model

TINY = Model(hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, inner=96, vocab=101)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_HEARTBEAT", "5")


def test_sizes() -> None:
    assert [bytes_of(text) for text in ("64MiB", "1.5GiB", "2GB", "1000", "7KiB")] == [
        64 << 20, 3 << 29, 2 * 10**9, 1000, 7 << 10,
    ]  # fmt: skip
    for text in ("", "MiB", "64 apples", "-1MiB"):
        with pytest.raises(ConfigError, match="is no size"):
            bytes_of(text)


def test_the_limit_is_measured_both_ways() -> None:
    found = rates(TINY, 2, rounds=2)
    assert found.keys() == KINDS.keys()
    assert all(len(seen) == 2 and min(seen) > 0 for seen in found.values())


def test_an_update_under_a_watermark() -> None:
    plain = Setup(TINY, trainers=2, receivers=1, tp=1, dtype="float32", trainer="fabric_rlweights.job.plain")
    (run,) = watermarks(plain, [1 << 14], 1, lambda _: None).runs
    assert 0 < run.peak_bytes <= run.limit_bytes == 1 << 14
    assert run.seconds > 0


BLOCKS = Model(hidden=128, layers=1, heads=2, kv_heads=2, head_dim=64, inner=256, vocab=100)


@pytest.mark.parametrize(
    "more",
    [
        {"fp8": True},
        pytest.param({"baselines": True, "double_buffer": True}, marks=pytest.mark.skipif(
            "FABRIC_RL_JOBS" not in os.environ, reason="FABRIC_RL_JOBS=1 runs it: many torch processes"
        )),
    ],
    ids=["fp8", "other ways beside it"],
)  # fmt: skip
def test_a_trainer_and_an_inference_rank_on_a_device(more: dict[str, bool]) -> None:
    """The device is the CPU: what is measured, and that what is served is compared with what it should be."""
    pytest.importorskip("torch")
    setup = Setup(BLOCKS, trainers=1, receivers=1, tp=1, **more)  # type: ignore[arg-type]
    done = bench_device(setup_for(setup, "cpu"), 2, lambda _: None)
    assert [way.name for way in done.ways] == (["fabric", "rank0", "ipc"] if "baselines" in more else ["fabric"])
    assert all(way.equal for way in done.ways)
    assert len(done.ways[0].seconds) == 2
    assert done.bytes < done.model_bytes if "fp8" in more else done.bytes == done.model_bytes
    assert done.of_limit is not None
    assert done.of_limit > 0


@pytest.mark.skipif("FABRIC_RL_JOBS" not in os.environ, reason="FABRIC_RL_JOBS=1 runs it: many torch processes")
def test_all_ways_leave_the_same_bytes() -> None:
    pytest.importorskip("torch")
    done = bench(Setup(TINY, trainers=2, receivers=2, tp=1, baselines=True), 1, True, lambda _: None)
    assert [way.name for way in done.ways] == ["fabric", "rank0", "broadcast"]
    assert all(way.equal for way in done.ways)
    assert done.limit_gbyte_s == max(done.limits_gbyte_s.values())
    assert done.of_limit is not None
    assert done.of_limit > 0
