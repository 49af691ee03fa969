"""The conformance kit itself: its options, what it costs those who do not use it, and its program for peers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KIT = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "fabric_core.conformance"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KIT, *arguments], cwd=cwd, capture_output=True, text=True, timeout=100)


def test_without_a_backend_every_test_is_skipped_and_says_how_to_choose_one(tmp_path: Path) -> None:
    ended = run("-q", "-rs", "-k", "test_c01 or test_property", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert "--fabric-backend NAME" in ended.stdout
    assert "passed" not in ended.stdout


@pytest.mark.parametrize("wrong", [["--fabric-nics", "9"], ["--fabric-nics", "x"], ["--fabric-set", "novalue"]])
def test_a_wrong_option_is_explained(tmp_path: Path, wrong: list[str]) -> None:
    ended = run("--fabric-backend", "local", *wrong, cwd=tmp_path)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert wrong[1] in ended.stderr


def test_the_numbers_of_nics_become_parameters(tmp_path: Path) -> None:
    ended = run("--fabric-backend", "local", "--fabric-nics", "1", "3", "--collect-only", "-q", cwd=tmp_path)
    assert "[1nic" in ended.stdout
    assert "[3nic" in ended.stdout
    assert "[2nic" not in ended.stdout


def test_an_unknown_backend_fails_every_test_by_name(tmp_path: Path) -> None:
    ended = run("--fabric-backend", "nosuch", "-q", "-k", "test_an_empty_message_is_a_message", cwd=tmp_path)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert "there is no backend 'nosuch'" in ended.stdout


def test_the_plugin_costs_next_to_nothing_at_start() -> None:
    """It is loaded in every pytest session where fabric-core is installed."""
    script = "import sys, fabric_core.conformance.plugin; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "hypothesis", "pydantic"} & set(loaded)


def test_the_peer_program_answers_each_line_and_ends_with_its_input() -> None:
    peer = [sys.executable, "-m", "fabric_core.conformance.peer"]
    settings = {"backend": "local", "nics": 1, "name": None, "settings": {}, "imports": []}
    lines = [{"do": "open", **settings}, {"do": "alloc_imm"}, {"do": "free_imm", "imm": 123456}, {"do": "nonsense"}]
    ended = subprocess.run(
        peer, input="\n".join(map(json.dumps, lines[:3])) + "\n", capture_output=True, text=True, timeout=60
    )
    address, imm, stale = map(json.loads, ended.stdout.splitlines())
    assert address["ok"].startswith("local:")
    assert isinstance(imm["ok"], int)
    assert stale["error"]["type"] == "StaleHandle"
    assert ended.returncode == 0
