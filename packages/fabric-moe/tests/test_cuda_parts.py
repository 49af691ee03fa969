"""What can be said of the path on GPUs without a GPU: layout, structures, the cache of kernels, clear refusals."""

from __future__ import annotations

import ctypes
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_core import ConfigError, TransferEngine, Unsupported
from fabric_moe import MoeConfig, MoeGroup, Table
from fabric_moe.cuda import arguments, blocks, driver, generation, halves, report
from fabric_moe.cuda import compile as nvrtc
from fabric_moe.cuda.layout import GpuLayout

SHAPE: dict[str, Any] = {"ranks": 4, "experts": 10, "topk": 3, "hidden": 40, "max_tokens": 7}
V3: dict[str, Any] = {"experts": 256, "topk": 8, "hidden": 7168, "dtype": "float8_e4m3fn", "scale_bytes": 224}
SIZES = {"u32": 4, "int": 4, "u64": 8, "i64": 8}


def members(name: str) -> list[tuple[str, int]]:
    """Names and sizes of a structure's members, as the kernels have it."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", nvrtc.source(), re.S)
    assert body is not None
    found = []
    for line in body[1].splitlines():
        kind, _, names = re.sub(r"//.*", "", line).strip().rstrip(";").replace("const ", "").partition(" ")
        for word in filter(None, names.split(", ")):
            size = 8 if "*" in kind + word else SIZES.get(kind, 0)
            plain, _, count = word.lstrip("*").partition("[")
            found.append((plain, (size or ctypes.sizeof(generation.Common)) * int(count.rstrip("]") or 1)))
    return found


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("Host", report.Words), ("Common", generation.Common), ("SendArgs", arguments.Send),
        ("RecvArgs", arguments.Recv), ("BackArgs", arguments.Back), ("SumArgs", arguments.Sum),
    ],
)  # fmt: skip
def test_structures_are_those_of_the_kernels(name: str, here: type[ctypes.Structure]) -> None:
    assert members(name) == [(field[0], ctypes.sizeof(field[1])) for field in here._fields_]


def test_codes_are_those_of_the_kernels() -> None:
    def value(name: str) -> int:
        found = re.search(rf"#define {name} (\d+)", nvrtc.source())
        assert found is not None
        return int(found[1])

    for name in ("BAD_ID", "BAD_LIVE", "OVERFLOW", "DISCARDED"):
        assert value(name) == getattr(report, name)
    assert value("FLAG_DISCARDED") == halves._DISCARDED
    assert value("THREADS") == blocks.THREADS
    assert value("ALONE") == blocks._ALONE
    local = members("Local")
    assert local[:4] == [("epoch", 64), ("done", 8), ("broken", 4), ("unreachable", 4)]
    assert generation.UNREACHABLE_AT == 64 + 8 + 4
    before = sum(size for _, size in local[:-2])
    assert local[-2:] == [("culprits", 8), ("begun", 64)]
    assert before % 8 == 0
    assert before + 8 + 64 <= GpuLayout.of(MoeConfig(**SHAPE)).peers_at


@settings(max_examples=80, deadline=None)
@given(
    ranks=st.integers(1, 64), experts=st.integers(1, 300), topk=st.integers(1, 40), hidden=st.integers(1, 300),
    tokens=st.integers(1, 90), scales=st.integers(0, 9), depth=st.integers(1, 4),
)  # fmt: skip
def test_regions_follow_one_another(
    ranks: int, experts: int, topk: int, hidden: int, tokens: int, scales: int, depth: int
) -> None:
    config = MoeConfig(
        ranks=ranks, experts=experts, topk=topk, hidden=hidden, max_tokens=tokens, scale_bytes=scales, depth=depth
    )
    at = GpuLayout.of(config)
    held = max(len(config.experts_of(r)) for r in range(ranks))
    assert at.held == held
    assert at.row_bytes >= config.token_bytes + scales
    assert at.meta_bytes >= 4 * (3 * topk + 1)
    regions = [
        (at.in_row_flags, -(-8 * ranks // 16) * 16 + 4 * ranks * at.row_parts),
        (at.in_sum_flags, -(-8 * ranks // 16) * 16 + 4 * ranks * at.sum_parts),
        (at.in_counts, 4 * ranks * held),
        (at.in_meta, ranks * tokens * at.meta_bytes), (at.in_rows, ranks * tokens * at.row_bytes),
        (at.in_sums, tokens * config.fan_out * config.sum_bytes), (at.in_stride, 0),
    ]  # fmt: skip
    for (begin, size), (following, _) in itertools.pairwise(regions):
        assert begin % 16 == 0
        assert begin + size <= following
    assert at.in_notes == at.in_stride * depth
    assert at.in_notes + 8 * ranks <= at.in_bytes
    assert at.turns_at(depth - 1) + tokens <= at.local_bytes
    assert at.peers_at + 8 * ranks <= at.turns_at(0)
    memory = at.memory()
    assert memory["total"] == at.in_bytes + at.local_bytes


def test_memory_of_known_shapes() -> None:
    """Far below 4 GB for a node of eight with 4,096 tokens each, two steps under way."""
    decode = GpuLayout.of(MoeConfig(ranks=8, max_tokens=128, **V3)).memory()["total"]
    prefill = GpuLayout.of(MoeConfig(ranks=8, max_tokens=4096, **V3)).memory()["total"]
    assert decode < 48 << 20
    assert prefill < 1.5 * 2**30


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": 65, "experts": 65}, "ranks=65: on GPUs at most 64"),
        ({"experts": 8193}, "experts=8193"),
        ({"topk": 129}, "topk=129"),
        ({"out_dtype": "float64", "dtype": "float64"}, "float64"),
    ],
)
def test_shapes_that_kernels_do_not_take(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GpuLayout.of(MoeConfig(**{**SHAPE, **change}))


# ---- the cache of kernels -------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of every compilation that was really made."""
    made: list[str] = []

    def fake(text: str, options: list[str]) -> bytes:
        made.append(" ".join(options))
        return f"cubin of {options[-1]}".encode()

    monkeypatch.setenv("FABRIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "_compile", fake)
    monkeypatch.setattr(nvrtc, "_version", lambda: "13.0")
    return made


def test_kernels_are_compiled_once(compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nvrtc.cubin({"RANKS": 2}, "sm_90")
    assert nvrtc.cubin({"RANKS": 2}, "sm_90") == first
    assert len(compiled) == 1
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    nvrtc.cubin({"RANKS": 3}, "sm_90")
    nvrtc.cubin({"RANKS": 2}, "sm_80")
    monkeypatch.setattr(nvrtc, "_version", lambda: "13.1")
    nvrtc.cubin({"RANKS": 2}, "sm_90")
    assert len(compiled) == 4


def test_a_damaged_cache_is_made_anew(compiled: list[str], tmp_path: Path) -> None:
    first = nvrtc.cubin({"RANKS": 2}, "sm_90")
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert nvrtc.cubin({"RANKS": 2}, "sm_90") == first
    assert len(compiled) == 2
    assert nvrtc.cubin({"RANKS": 2}, "sm_90") == first
    assert len(compiled) == 2


def test_a_cache_that_cannot_be_written_costs_time_only(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FABRIC_CACHE", str(tmp_path / "file"))
    assert nvrtc.cubin({"RANKS": 2}, "sm_90") == nvrtc.cubin({"RANKS": 2}, "sm_90")
    assert len(compiled) == 2


def test_a_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_NVRTC", "/nowhere/libnvrtc.so")
    nvrtc._nvrtc.cache_clear()
    with pytest.raises(Unsupported, match="FABRIC_NVRTC"):
        nvrtc._nvrtc()
    nvrtc._nvrtc.cache_clear()


def test_a_driver_that_is_missing_is_named(engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_LIBRARY", "libno-such-driver.so.1")
    driver._cuda.cache_clear()
    with pytest.raises(Unsupported, match=r"libno-such-driver\.so\.1 cannot be loaded"):
        MoeGroup.open(engines[0], MoeConfig(**{**SHAPE, "ranks": 1}), 0, Table(), device="cuda:77")
    driver._cuda.cache_clear()
    with pytest.raises(ConfigError, match="device='gpu'"):
        MoeGroup.open(engines[0], MoeConfig(**{**SHAPE, "ranks": 1}), 0, Table(), device="gpu")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_kernels_compile(arch: str) -> None:
    """For each kind of GPU, which need not be there, with scales and without."""
    try:
        nvrtc._nvrtc()
    except Unsupported as error:
        pytest.skip(str(error))
    for more in ({}, {"scale_bytes": 6, "dtype": "float8_e4m3fn", "wire_dtype": "float16"}):
        macros = GpuLayout.of(MoeConfig(**{**SHAPE, **more})).macros()
        options = [*nvrtc._OPTIONS, f"--gpu-architecture={arch}", *(f"-D{name}={n}" for name, n in macros.items())]
        assert len(nvrtc._compile(nvrtc.source(), options)) > 10_000
