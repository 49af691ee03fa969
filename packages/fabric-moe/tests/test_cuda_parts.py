"""What can be said of the path on GPUs without a GPU: memory, words, cards, the cache of kernels, clear refusals."""

from __future__ import annotations

import ctypes
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_core import BackendError, BadRange, ConfigError, ProtocolError, TransferEngine, Unsupported
from fabric_moe import MoeConfig, MoeGroup, RankLost, StepError, Table
from fabric_moe.cuda import compile as nvrtc
from fabric_moe.cuda import driver, generation, halves, report
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
            found.append((word.lstrip("*"), size or ctypes.sizeof(generation.Common)))
    return found


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("Host", report.Words), ("Common", generation.Common), ("SendArgs", halves._Send), ("RecvArgs", halves._Recv),
        ("BackArgs", halves._Back), ("SumArgs", halves._Sum),
    ],
)  # fmt: skip
def test_structures_are_those_of_the_kernels(name: str, here: type[ctypes.Structure]) -> None:
    assert members(name) == [(field[0], ctypes.sizeof(field[1])) for field in here._fields_]


def test_codes_are_those_of_the_kernels() -> None:
    for name in ("LOST", "BAD_ID", "BAD_LIVE", "OVERFLOW", "DISCARDED"):
        value = re.search(rf"#define {name} (\d+)", nvrtc.source())
        assert value is not None
        assert int(value[1]) == getattr(report, name)
    assert halves._DISCARDED == report.DISCARDED
    assert f"#define THREADS {halves._THREADS}" in nvrtc.source()
    assert members("Local")[:4] == [("epoch[16]", 4), ("done[2]", 4), ("broken", 4), ("unreachable", 4)]
    assert generation.UNREACHABLE_AT == 4 * (16 + 2 + 1)


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
        (at.in_row_flags, 8 * ranks), (at.in_sum_flags, 8 * ranks), (at.in_counts, 4 * ranks * held),
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


# ---- what a kernel says ---------------------------------------------------------------------------------------------


def said(**values: int) -> report.Report:
    words = report.Words(**values)
    made = report.Report(ctypes.addressof(words), 1, 10, {2: "local://x"})
    made.keep = words  # type: ignore[attr-defined]
    return made


def test_errors_name_what_is_wrong() -> None:
    assert said().error() is None
    lost = said(code=report.LOST, culprits=0b110).error()
    assert isinstance(lost, RankLost)
    assert lost.ranks == (1, 2)
    assert "rank 1 (this rank), rank 2 at local://x" in str(lost)
    for code, words, kind in [
        (report.BAD_ID, "token 5 named expert 99: experts go from 0 to 9", BadRange),
        (report.BAD_LIVE, "live=5, topk_ids has 99 tokens", BadRange),
        (report.OVERFLOW, "a view needed 5 rows, its capacity is 99", BadRange),
        (report.DISCARDED, r"ranks \[0, 2\] discarded", StepError),
    ]:
        found = said(code=code, first=5, second=99).error()
        assert isinstance(found, kind)
        assert re.search(words, str(found))


def test_what_costs_one_step_is_said_once_and_what_ends_a_group_always() -> None:
    once = said(code=report.BAD_ID | report.BAD_LIVE)
    assert [type(once.error()) for _ in range(3)] == [BadRange, BadRange, type(None)]
    always = said(code=report.LOST, culprits=1)
    assert [type(always.error()) for _ in range(2)] == [RankLost, RankLost]


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


# ---- cards ----------------------------------------------------------------------------------------------------------


class FakeDevice:
    """A GPU in name only."""

    def __init__(self) -> None:
        self.number, self.arch, self.multiprocessors = 0, "sm_90", 132
        self.words = ctypes.create_string_buffer(64)
        self.held: list[int] = []
        self.opened: list[bytes] = []
        self.closed = 0
        self.full = False
        self.peers: tuple[int, ...] = ()

    def load(self, image: bytes) -> bytes:
        return image

    def kernel(self, module: Any, name: str) -> str:
        return name

    def allocate(self, nbytes: int) -> int:
        if self.full:
            raise BackendError("cuMemAlloc_v2: out of memory (2)")
        self.held.append(0x1000 * (len(self.held) + 1))
        return self.held[-1]

    def free(self, at: int) -> None:
        self.held.remove(at)

    def free_host(self, at: int) -> None:
        pass

    def host_words(self, nbytes: int) -> int:
        return ctypes.addressof(self.words)

    def put(self, at: int, data: bytes) -> None:
        self.peers = tuple(memoryview(data).cast("Q"))

    def handle_of(self, at: int) -> bytes:
        return at.to_bytes(64, "little")

    def open_handle(self, handle: bytes) -> int:
        self.opened.append(handle)
        return 0xA000 + len(self.opened)

    def close_handle(self, at: int) -> None:
        self.closed += 1

    def synchronize(self) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    made = FakeDevice()
    monkeypatch.setattr(generation, "device", lambda number: made)
    monkeypatch.setattr(nvrtc, "cubin", lambda macros, arch: b"image")
    return made


def test_ranks_meet_by_address_or_by_handle(fake: FakeDevice, engines: list[TransferEngine]) -> None:
    """Two ranks of this process, and two that another process has: its memory is opened once for each of ours."""
    config = MoeConfig(**SHAPE)
    ours = [generation.GpuGeneration(engines[0], config, r, 0, range(4), "cuda:0") for r in range(2)]
    cards = {r: gen.card() for r, gen in enumerate(ours)}
    for r in (2, 3):
        cards[r] = json.dumps({**json.loads(cards[0]), "rank": r, "process": "other", "handle": f"{r:0128x}"})
    for gen in ours:
        gen.connect(cards)
        assert fake.peers == (ours[0].inbound, ours[1].inbound, 0xA001, 0xA002)
    assert len(fake.opened) == 2
    assert ours[0].common(1).alive == 0b1111
    ours[0].close()
    assert fake.closed == 0  # the other one still uses them
    ours[1].close()
    ours[1].close()
    assert fake.closed == 2
    assert fake.held == []


def test_memory_of_a_broken_generation_is_kept(fake: FakeDevice, engines: list[TransferEngine]) -> None:
    gen = generation.GpuGeneration(engines[0], MoeConfig(**SHAPE), 0, 0, range(4), "cuda:0")
    report.Words.from_address(ctypes.addressof(fake.words)).code = report.LOST
    gen.close()
    assert len(fake.held) == 2


def test_memory_that_is_not_to_be_had(fake: FakeDevice, engines: list[TransferEngine]) -> None:
    fake.full = True
    with pytest.raises(BackendError, match=r"out of memory.*lower max_tokens or depth"):
        generation.GpuGeneration(engines[0], MoeConfig(**SHAPE), 0, 0, range(4), "cuda:0")


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"kind": None}, ProtocolError, "opened for host memory"),
        ({"version": 2}, ProtocolError, "speaks version 2"),
        ({"shape": {}}, ProtocolError, "another shape: ranks is None there and 4 here"),
        ({"shape": 7}, ProtocolError, "another shape"),
        ({"rank": 3}, ProtocolError, "is that of rank 3"),
        ({"members": [0, 1]}, ProtocolError, "mask the same ranks"),
        ({"handle": "ab"}, ProtocolError, "a handle of 1 bytes"),
        ({"handle": "xy"}, ProtocolError, "is no card"),
        ({"process": "other", "boot": "elsewhere"}, ConfigError, "on another host"),
    ],
)
def test_cards_that_are_wrong(
    fake: FakeDevice, engines: list[TransferEngine], change: dict[str, Any], kind: type[Exception], words: str
) -> None:
    gen = generation.GpuGeneration(engines[0], MoeConfig(**SHAPE), 0, 0, range(4), "cuda:0")
    card = json.loads(gen.card())
    cards = {r: json.dumps({**card, "rank": r}) for r in range(4)}
    cards[1] = json.dumps({**card, "rank": 1, **change})
    with pytest.raises(kind, match=words):
        gen.connect(cards)
    for text in ("", "[]", "{", "7"):
        with pytest.raises(ProtocolError, match="no card"):
            gen.connect({**cards, 1: text})
    gen.close()
