"""`fabric demo kv` for real: a model, two processes, and the same text both ways."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fabric_kvcache.demo.model import why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

DEADLINE = 240.0  # seconds: importing torch and loading the model twice, on a busy machine


@pytest.fixture(autouse=True)
def _extras() -> None:
    if reason := why_not():
        pytest.skip(reason)


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `fabric demo kv`; it and its children, which die with it, are gone after the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from fabric_core.cli import main; main()", "demo", "kv", *words]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=60)


def children(pid: int) -> dict[str, int]:
    """Return the demo's processes by role."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        for role in ("prefiller", "decoder"):
            if f"fabric_kvcache.demo.{role}".encode() in words:
                found[role] = int(child)
    return found


def wait_gone(pids: list[int]) -> None:
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "a process was left behind"
        time.sleep(0.01)


def check(report: dict[str, Any], *, page_tokens: int, chunk: int, nics: int) -> None:
    assert report["schema"] == "fabric.demo.kv/1"
    assert report["problems"] == []
    data = report["data"]
    decoder, prefiller = data["decoder"], data["prefiller"]
    assert data["equal"] is decoder["kv_equal"] is decoder["logits_equal"] is True
    assert decoder["text"] == decoder["one_text"]
    assert decoder["tokens"] == decoder["one_tokens"]
    assert len(decoder["text"]) > 20
    assert decoder["nics"] == nics
    pages = -(-decoder["prompt_tokens"] // page_tokens)
    layers = decoder["model"]["layers"]
    assert decoder["pages"] == pages
    assert decoder["writes"] == prefiller["writes"]
    assert layers + 1 < decoder["writes"] <= pages * layers + 1  # pages that are adjacent on both sides go as one
    assert decoder["bytes"] == prefiller["bytes"] == pages * layers * decoder["page_bytes"] + 4 * 49152
    assert decoder["request_id"] == prefiller["request_id"]
    assert [layer["layer"] for layer in prefiller["layers"]] == list(range(layers))
    assert all(layer["compute_us"] > 0 and layer["transfer_us"] > 0 for layer in prefiller["layers"])
    assert prefiller["chunk_tokens"] == chunk
    assert 0 <= prefiller["overlap"] <= 1
    assert 0 < prefiller["prefill_us"] < decoder["ttft_us"]


def test_the_text_is_the_same_with_two_processes_and_with_one(start: Start) -> None:
    process = start("--json", "--max-new-tokens", "24")
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    check(json.loads(out), page_tokens=16, chunk=0, nics=1)


def test_it_is_the_same_with_chunks_small_pages_and_several_nics(start: Start) -> None:
    process = start(
        "--json", "--max-new-tokens", "12", "--page-tokens", "8", "--chunk-tokens", "48", "--nics", "3",
        "--prompt", "Write a short story about a lighthouse keeper who finds a message in a bottle. " * 4,
    )  # fmt: skip
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    check(json.loads(out), page_tokens=8, chunk=48, nics=3)


def test_a_prefiller_that_is_killed_ends_the_demo_with_one_sentence_and_code_4(start: Start) -> None:
    process = start("--prompt", "The keeper of the lighthouse wrote into his book again and again. " * 60)
    assert process.stderr is not None
    assert "starting" in process.stderr.readline()
    assert process.stderr.readline().startswith("prefiller local:")  # both are ready, the request is on its way
    roles = children(process.pid)
    os.kill(roles["prefiller"], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 4, err
    assert err.startswith("error: the prefiller process (pid ")
    assert "SIGKILL" in err
    assert "local:prefiller-" in err
    assert err.count("\n") == 1
    assert out == ""
    wait_gone(list(roles.values()))


@pytest.mark.timeout(600)
def test_a_fleet_survives_the_death_of_a_prefiller(start: Start) -> None:
    process = start("--fleet", "--json", "--max-new-tokens", "12")
    out, err = process.communicate(timeout=2 * DEADLINE)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert (report["schema"], report["problems"]) == ("fabric.demo.kv.fleet/1", [])
    data = report["data"]
    assert data["equal"] is True
    assert data["killed"]["layers"] == data["killed"]["of"] // 2
    assert [len(result["asked"]) for result in data["decoders"]].count(2) == 1
    assert len({result["text"] for result in data["decoders"]}) == 2


def test_no_process_is_left_behind_when_the_demo_is_interrupted(start: Start) -> None:
    process = start()
    assert process.stderr is not None
    assert "starting" in process.stderr.readline()
    end = time.monotonic() + 60
    while len(roles := children(process.pid)) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    wait_gone(list(roles.values()))
