"""`fabric rl`: what makes no sense is said at once, with exit code 2, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fabric_core import ConfigError, PeerLost
from fabric_rlweights.cli import rl_app
from fabric_rlweights.job.launch import Job, Setup
from fabric_rlweights.job.model import Model

TINY = Model(hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, inner=96, vocab=101)
PLAIN = "fabric_rlweights.job.plain"
TRAINER = {
    "rank": 0,
    "shards": [
        {
            "param": "q", "shape": [8, 64], "dtype": "bfloat16", "start": [0, 0], "size": [8, 64], "buffer": 0,
            "offset": 0, "strides": [128, 2],
        }
    ],
}  # fmt: skip
ENGINE = {
    "rank": 0,
    "tensors": [{"name": "q", "shape": [8, 64], "strides": [128, 2], "dtype": "bfloat16"}],
    "entries": [{"param": "q", "start": [0, 0], "size": [8, 64], "tensor": "q", "at": [0, 0]}],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").write_text(json.dumps([TRAINER]))
    (tmp_path / "e.json").write_text(json.dumps([ENGINE]))
    return tmp_path


def fabric_rl(*words: str) -> Result:
    return CliRunner().invoke(rl_app, list(words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "--size", "²GiB"], "is no size"),
        (["bench", "--receivers", "3", "--size", "8MiB"], "cannot be cut for 3 inference ranks"),
        (["bench", "--under", "0", "--size", "4MiB"], "a watermark of 0 bytes"),
        (["bench", "--fp8"], "need --device"),
        (["bench", "--device", "cpu", "--fp8", "--size", "4MiB"], "give --no-baselines"),
        (["bench", "--device", "cpu", "--trainers", "2", "--size", "4MiB"], "not 2 (TP 1) and 1"),
        (["plan", "t.json", "e.json", "--piece-bytes", str(1 << 70)], "below 2**62"),
        (["plan", "t.json", "e.json", "--without", "7"], "no trainer rank 7"),
        (["simulate", "--nic", "none"], "no NIC is called 'none'"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_usage(words: list[str], said: str) -> None:
    done = fabric_rl(*words)
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert "none, " not in done.output  # what is refused is not offered


@pytest.mark.parametrize("where", ["rank", "stride", "address"])
def test_numbers_that_no_machine_holds(folder: Path, where: str) -> None:
    tensor = {**ENGINE["tensors"][0]}  # type: ignore[index]
    table = {**ENGINE, "tensors": [tensor]}
    if where == "rank":
        table["rank"] = 1 << 70
    elif where == "stride":
        tensor["strides"] = [1 << 62, 2]
    else:
        tensor["address"] = 1 << 64
    (folder / "e.json").write_text(json.dumps([table]))
    done = fabric_rl("plan", "t.json", "e.json")
    assert done.exit_code == 2, done.output
    assert where in done.output


@pytest.mark.usefixtures("folder")
def test_a_diff_as_json_has_the_envelope() -> None:
    assert fabric_rl("plan", "t.json", "e.json", "-o", "plan.json").exit_code == 0
    done = fabric_rl("diff", "plan.json", "plan.json", "--json")
    found = json.loads(done.stdout)
    assert found["schema"] == "fabric.rl.diff/1"
    assert found["data"] == {"params": []}
    assert {"host", "time", "versions", "problems"} <= found.keys()


def test_a_process_that_ends_at_once_is_not_waited_for() -> None:
    setup = Setup(TINY, trainers=2, receivers=3, tp=1, trainer=PLAIN, start_timeout=3600.0)
    with pytest.raises(PeerLost, match="cannot be cut for 3 inference ranks"), Job(setup):
        pass


def test_a_plan_that_cannot_be_is_not_waited_for() -> None:
    setup = Setup(
        TINY, trainers=1, receivers=1, tp=1, dtype="float32", watermark=64, trainer=PLAIN, start_timeout=3600.0
    )
    with pytest.raises(ConfigError, match="trainer 0 cannot take up the plan"), Job(setup):
        pass


JOB = """
import sys, time
from fabric_rlweights.job.launch import Job, Setup, tidy_when_terminated
from fabric_rlweights.job.model import Model

tidy_when_terminated()
model = Model(hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, inner=96, vocab=101)
with Job(Setup(model, trainers=1, receivers=1, tp=1, trainer="fabric_rlweights.job.plain")):
    print("up", flush=True)
    time.sleep(3600)
"""


def test_a_job_that_is_terminated_leaves_no_files(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", JOB], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        assert list(tmp_path.glob("fabric-rl-*"))
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("fabric-rl-*"))
