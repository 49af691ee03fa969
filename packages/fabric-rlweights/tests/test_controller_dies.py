"""The controller is killed when everything has arrived: nobody hangs, and whoever serves, serves the same version."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import pytest
from fault_job import check, setup

from fabric_rlweights.job.launch import Child, start

LONE = str(Path(__file__).parent / "lone_controller.py")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_HEARTBEAT", "5")


@pytest.mark.parametrize(
    ("at", "told", "serving"),
    [("Commit", 0, 0), ("Commit", 1, 0), ("Resume", 1, 1)],
    ids=["nobody was told to commit", "one receiver was told to commit", "one receiver was told to resume"],
)
def test_a_controller_that_dies_leaves_no_mixture(at: str, told: int, serving: int, tmp_path: Path) -> None:
    made = setup(double_buffer=True)
    words = [f"--parent={os.getpid()}", "--trainers=2", "--receivers=2", "--die-at=2", f"--at={at}", f"--told={told}"]
    lone = Child("controller", 0, LONE, words)
    children = [lone]
    try:
        address = lone.hear(60.0)["address"]
        trainers = [start(made, "trainer", rank, address, str(tmp_path)) for rank in range(2)]
        receivers = [start(made, "receiver", rank, address, str(tmp_path)) for rank in range(2)]
        children += [*trainers, *receivers]
        for child in children[1:]:
            child.hear(60.0)
        for version, seconds in ((1, 60.0), (2, 10.0)):
            for child in trainers:
                child.tell("fill", version=version)
                child.hear(60.0)
            for child in trainers:
                child.tell("push", version=version, seconds=seconds)
            answers = [child.hear(seconds + 60.0) for child in trainers]
            assert all(answer["committed"] == (version == 1) for answer in answers), answers
            if version == 1:
                check(receivers, 1)
        for answer in answers:
            assert answer["culprits"] == ["controller"]
            assert "in doubt" in answer["reason"]
            assert answer["seconds"] < 10.0 + 8.0
        # whoever was told to resume serves version 2, which all have by then; others stop at the deadline at the latest
        until = time.monotonic() + 60.0
        while True:
            for child in receivers:
                child.tell("state")
            states = [child.hear(60.0) for child in receivers]
            if sum(state["serving"] for state in states) <= serving or time.monotonic() > until:
                break
            time.sleep(0.1)
        assert sorted(state["serving"] for state in states) == [False] * (2 - serving) + [True] * serving
        check([child for child, state in zip(receivers, states, strict=True) if state["serving"]], 2)
    finally:
        for child in children:
            child.tell("exit")
        for child in children:
            child.close()
