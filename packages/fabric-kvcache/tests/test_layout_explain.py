"""`fabric kv explain`, as a user runs it, and the figures against the paper's and by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fabric_kvcache.cache import AttentionGroup, CacheLayout, LatentGroup, StateGroup, StatePart
from fabric_kvcache.explain import explain

README = Path(__file__).parent.parent / "README.md"


def kv(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fabric_core.cli", "kv", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def save(path: Path, layout: CacheLayout) -> Path:
    path.write_bytes(layout.to_json())
    return path


def qwen(tp: int, **changes: Any) -> CacheLayout:
    """Qwen3-235B: at TP 4 a rank holds one head, 32 kB of K and as much of V in a page of 128 tokens."""
    usual: dict[str, Any] = {"layers": 94, "kv_heads": 4, "head_dim": 128, "page_tokens": 128, "dtype": "bfloat16"}
    return CacheLayout(groups=(AttentionGroup(**{**usual, **changes}),), tp=tp)


def test_a_pair_that_works(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a.json", qwen(4)), save(tmp_path / "b.json", qwen(2, page_tokens=64))
    done = kv("explain", a, b, "--json", "--tokens", "4096")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["schema"], report["problems"]) == ("fabric.kv.explain/1", [])
    data = report["data"]
    assert data["works"] is True
    assert data["bytes_per_token"] == 94 * 2 * 4 * 128 * 2
    assert data["bytes"] == 4096 * data["bytes_per_token"]
    shown = kv("explain", a, b)
    assert shown.returncode == 0
    assert f"takes {data['writes']} writes with {data['bytes']} bytes" in shown.stdout
    assert re.search(r"0-93 +attention", shown.stdout)


def test_a_pair_that_does_not_work_says_why_with_both_values(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a.json", qwen(4)), save(tmp_path / "b.json", qwen(4, dtype="float8_e4m3"))
    done = kv("explain", a, b)
    assert done.returncode == 1
    assert "does not work: layers 0-93: the source has elements of type bfloat16" in done.stdout
    assert "the destination float8_e4m3" in done.stdout
    report = json.loads(kv("explain", a, b, "--json").stdout)
    assert report["data"]["works"] is False
    assert report["problems"] == [report["data"]["reason"]]


@pytest.mark.parametrize("text", ["", "{}", '{"schema": "fabric.kv.layout/2"}'])
def test_a_file_that_is_no_layout_is_usage_and_is_named(tmp_path: Path, text: str) -> None:
    good, bad = save(tmp_path / "good.json", qwen(1)), tmp_path / "bad.json"
    bad.write_text(text)
    for argv in ((good, bad), (bad, good), (good, tmp_path / "none.json")):
        done = kv("explain", *argv)
        assert done.returncode == 2
        assert re.search(r"error: .*(bad|none)\.json: ", done.stderr)
        assert done.stdout == ""


def test_the_writes_of_the_papers_set_up_are_pages_times_layers_per_rank() -> None:
    cost = explain(qwen(4), qwen(4), tokens=4096)
    assert cost.writes == 4 * 94 * 32
    assert cost.writes_adjacent == 4 * 94
    assert cost.groups[0].longest_bytes == cost.groups[0].bytes_per_page == 2 * 128 * 128 * 2
    assert (cost.sources_least, cost.sources_most, cost.busiest_source) == (1, 1, 1.0)


def test_the_layouts_axes_decide_the_number_of_writes() -> None:
    nhd = explain(qwen(4, axes="block-NHD"), qwen(2, axes="block-NHD"), tokens=1024)
    hnd = explain(qwen(4), qwen(2), tokens=1024)
    assert nhd.bytes == hnd.bytes
    assert (hnd.groups[0].writes_per_page, nhd.groups[0].writes_per_page) == (2, 2 * 128)


def test_deepseek_spreads_its_latent_over_all_prefill_ranks() -> None:
    def layout(tp: int) -> CacheLayout:
        return CacheLayout(groups=(LatentGroup(layers=61, latent_dim=576, page_tokens=64, dtype="bfloat16"),), tp=tp)

    cost = explain(layout(8), layout(2), tokens=640)
    assert cost.writes == 2 * 61 * 10
    assert cost.busiest_source < 1.05
    assert cost.sources_most >= 4


def test_windows_and_states_are_counted_as_what_moves() -> None:
    layout = CacheLayout(
        groups=(
            AttentionGroup(layers=(0,), kv_heads=1, head_dim=4, page_tokens=16, dtype="float32", window=32),
            StateGroup(layers=(1,), parts=(StatePart(name="ssm", units=2, unit_bytes=8),)),
        )
    )
    window, state = explain(layout, layout, tokens=320).groups
    assert (window.pages, window.writes, window.bytes) == (2, 2, 32 * 2 * 4 * 4)
    assert (state.pages, state.writes, state.bytes) == (1, 1, 16)


def test_the_readmes_example_works_as_shown(tmp_path: Path) -> None:
    layouts = re.findall(r"```json\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(layouts) == 2
    paths = []
    for number, text in enumerate(layouts):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(text)
    done = kv("explain", *paths)
    assert done.returncode == 0
    shown = re.search(r"\$ fabric kv explain prefill.json decode.json\n(.*?)```", README.read_text(), re.DOTALL)
    assert shown is not None
    assert done.stdout == shown[1]
