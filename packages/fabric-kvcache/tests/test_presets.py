"""Presets and `fabric kv simulate`: the paper's geometry and times, and what they become on NICs that are not here."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_core import ConfigError
from fabric_kvcache.explain import explain
from fabric_kvcache.presets import PRESETS, find_preset
from fabric_kvcache.simulate import busiest_layer, simulate

QWEN = PRESETS["qwen3-235b"]
LENGTHS = (4096, 32768, 131072)


def kv(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fabric_core.cli", "kv", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_layer_of_qwen_has_the_papers_pages() -> None:
    for tokens, chunk_pages in ((4096, 256), (32768, 1024)):
        chunk = QWEN.chunks(tokens)[-1]
        every_rank = busiest_layer(QWEN.layout, QWEN.layout, chunk, shared=4)
        assert (every_rank.writes, every_rank.nbytes) == (chunk_pages, chunk_pages * 32768)
    assert [len(QWEN.chunks(tokens)) for tokens in LENGTHS] == [1, 2, 8]


def test_compute_times_add_up_to_the_papers_ttft_and_end_with_its_last_layer() -> None:
    for tokens, row in QWEN.paper.items():
        compute = QWEN.compute_us(tokens)
        assert sum(compute) * QWEN.layout.total_layers / 1e3 == pytest.approx(row.ttft_ms, rel=0.006)
        assert compute[-1] == row.last_layer_us
        assert compute == sorted(compute)


def test_estimates_agree_with_what_is_published() -> None:
    bare = dataclasses.replace(QWEN, paper={})
    for tokens, row in QWEN.paper.items():
        assert sum(bare.compute_us(tokens)) * 94 / 1e3 == pytest.approx(row.ttft_ms, rel=0.08)
        assert "estimated" in bare.origin(tokens)
        assert "published" in QWEN.origin(tokens)
    assert "estimated" in QWEN.origin(4096, 512)  # other chunks than the paper's
    assert "estimated" in find_preset("qwen3-235b:tp8").origin(4096)


@settings(deadline=None)
@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 300_000), st.sampled_from([0, 512, 1000, 16384]))
def test_chunks_partition_the_prompt_and_each_has_a_time(name: str, tokens: int, size: int) -> None:
    preset = PRESETS[name]
    chunks = preset.chunks(tokens, size)
    assert [chunk.first for chunk in chunks] == [0, *(chunk.end for chunk in chunks[:-1])]
    assert chunks[-1].end == tokens
    compute = preset.compute_us(tokens, size)
    assert len(compute) == len(chunks)
    assert min(compute) > 0


def test_known_sizes_of_the_models() -> None:
    per_token = {
        name: explain(p.layout, p.layout, tokens=4096).bytes_per_token / p.layout.tp for name, p in PRESETS.items()
    }
    assert per_token["qwen3-235b"] * 4 == 94 * 2 * 4 * 128 * 2
    assert per_token["llama3-70b"] * 8 == 80 * 2 * 8 * 128 * 2  # 320 KiB
    assert per_token["deepseek-v3"] == 61 * 576 * 2  # each rank has all of it


@pytest.mark.parametrize("text", ["gpt-5", "qwen3-235b:", "qwen3-235b:8", "qwen3-235b:tp", "qwen3-235b:tpx"])
def test_what_is_no_preset_is_refused_with_the_cure(text: str) -> None:
    with pytest.raises(ConfigError, match=r"there are qwen3-235b, deepseek-v3, llama3-70b|for example .*:tp2"):
        find_preset(text)


def test_a_degree_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp=3 and 4 KV heads"):
        find_preset("qwen3-235b:tp3")


# ---- simulate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [1, 4])
def test_qwen_over_efa_exposes_less_than_asked_at_every_length(shared: int) -> None:
    data = simulate(QWEN, QWEN.layout, LENGTHS, nic="efa-p5en", shared=shared)
    assert data.good
    for row in data.rows:
        assert 0 < row.overhead_percent < 1.9
        assert row.overhead_percent < (row.paper_overhead_percent or 0)
        assert row.hidden
        # Only the last layer of the last chunk is exposed, with its posting and the tail.
        assert row.exposed_us == pytest.approx(row.posted_us + row.transfer_us[-1] + row.tail_us)
        assert row.afterwards_percent > 10 * row.overhead_percent


def test_what_compute_does_not_hide_is_exposed() -> None:
    instant = dataclasses.replace(QWEN, paper={}, active_parameters=1e6, attention_flop=0)
    row = simulate(instant, QWEN.layout, [4096]).rows[0]
    assert not row.hidden
    assert row.exposed_us > 0.9 * 94 * row.transfer_us[0]
    assert row.overhead_percent > 100


def test_ranks_that_share_nics_and_slower_links_take_longer() -> None:
    one, four = (simulate(QWEN, QWEN.layout, [32768], shared=n).rows[0].transfer_us[-1] for n in (1, 4))
    assert four > 2.5 * one
    to_one = simulate(QWEN, find_preset("qwen3-235b:tp1").layout, [32768]).rows[0]
    assert to_one.layer_writes[-1] == 4 * 256  # all four ranks write into one


def test_the_command_prints_the_table_and_its_json_and_fails_above_the_limit() -> None:
    done = kv("simulate", "--preset", "qwen3-235b", "--tokens", "4096,32K")
    assert (done.returncode, done.stderr) == (0, "")
    assert "simulated, not measured" in done.stdout
    assert "published: arXiv 2510.27656" in done.stdout
    report = json.loads(kv("simulate", "--preset", "llama3-70b", "--tokens", "4K", "--json").stdout)
    assert (report["schema"], report["problems"]) == ("fabric.kv.simulate/1", [])
    assert report["data"]["rows"][0]["compute_origin"].startswith("estimated")
    strict = kv("simulate", "--preset", "qwen3-235b", "--tokens", "4K", "--limit", "0.001")
    assert strict.returncode == 1
    assert "TOO MUCH" in strict.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--preset", "gpt-5"), "no preset is called 'gpt-5'"),
        (("--preset", "llama3-70b", "--tokens", "many"), "--tokens 'many'"),
        (("--preset", "llama3-70b", "--nic", "x"), "no NIC is called 'x'"),
    ],
)
def test_usage_is_told_in_one_sentence(words: tuple[str, ...], told: str) -> None:
    done = kv("simulate", *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_explain_takes_presets() -> None:
    done = kv("explain", "qwen3-235b", "qwen3-235b:tp8", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["data"]["works"] is True
    wrong = kv("explain", "qwen3-235b", "llama3-70b")
    assert wrong.returncode == 1
    assert "the destination 0-79" in wrong.stdout
    none = kv("explain", "qwen3-235b", "nothing.json")
    assert none.returncode == 2
    assert "no preset either (qwen3-235b, deepseek-v3, llama3-70b)" in none.stderr
