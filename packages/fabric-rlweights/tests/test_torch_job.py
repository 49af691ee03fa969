"""Real FSDP2 x TP and HSDP jobs over gloo: what arrives is a load of the whole weights, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_rlweights.job.launch import Job, Setup
from fabric_rlweights.job.model import Model

pytest.importorskip("torch")

# Odd sizes: the vocabulary, 3 x 3 heads' rows and the inner dimension are cut unevenly by FSDP.
EXAMPLE = Path(__file__).parents[3] / "examples" / "rl" / "torchrun_fsdp2.py"
MODEL = Model(hidden=36, layers=1, heads=4, kv_heads=2, head_dim=6, inner=44, vocab=50)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_HEARTBEAT", "5")  # a busy machine may hold a process back for seconds


MANY = pytest.mark.skipif("FABRIC_RL_JOBS" not in os.environ, reason="FABRIC_RL_JOBS=1 runs it: many torch processes")


@pytest.mark.parametrize(
    "setup",
    [
        Setup(MODEL, trainers=2, tp=1, receivers=1, digests=True),
        Setup(MODEL, trainers=4, tp=2, receivers=2, digests=True),
        pytest.param(Setup(MODEL, trainers=2, tp=2, receivers=4), marks=MANY),  # 2 KV heads are replicated over 4 ranks
        pytest.param(Setup(MODEL, trainers=8, tp=2, replicate=2, receivers=1), marks=MANY),
    ],
    ids=["FSDP 2", "FSDP 2 x TP 2", "TP 2", "replicas 2 x FSDP 2 x TP 2"],
)
def test_every_byte_of_a_real_job(setup: Setup) -> None:
    with Job(setup) as job:
        for version in (1, 2):
            job.all(job.trainers, "fill", version=version)
            report, answers = job.update(version)
            assert report.committed, report
            assert not report.culprits, report
            assert all(answer["committed"] for answer in answers)
            for answer in job.all(job.receivers, "check", version=version):
                assert answer["wrong"] == []
                assert answer["version"] == version


@pytest.mark.skipif(not EXAMPLE.is_file(), reason=f"no source tree: {EXAMPLE} is not there")
def test_the_torchrun_example() -> None:
    words = ["--standalone", "--nproc-per-node", "2", str(EXAMPLE), "--receivers", "1", "--updates", "2"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *words],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "version 2 is served everywhere" in done.stdout
    assert "4 tensors are what the trainers have" in done.stdout
