"""What can be said of tokens on a GPU that travel through the engine by looking: structures, sizes, refusals."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nic_standin
import nic_words
import pytest
import torch

from fabric_core import (
    BackendError,
    BadRange,
    ConfigError,
    MrHandle,
    ProtocolError,
    QueueFull,
    TransferEngine,
    Unsupported,
    get_include,
)
from fabric_moe import MoeConfig, MoeGroup, StepError, Table, kernels
from fabric_moe.cuda import compile as nvrtc
from fabric_moe.cuda import report
from fabric_moe.gpu_nic import arguments, generation, halves, layout
from fabric_moe.gpu_nic.card import Card
from fabric_moe.gpu_nic.generation import NicGeneration
from fabric_moe.gpu_nic.memory import NicMemory
from fabric_moe.gpu_nic.report import NicReport

HERE = Path(__file__).parent
SOURCES = Path(kernels.__file__).parent / "native"
SHAPE: dict[str, Any] = {"ranks": 4, "experts": 10, "topk": 3, "hidden": 40, "max_tokens": 7}
V3: dict[str, Any] = {"experts": 256, "topk": 8, "hidden": 7168, "dtype": "float8_e4m3fn", "scale_bytes": 224}


def fields(name: str) -> list[tuple[str, int]]:
    """Names and sizes of a structure's members, as the kernels have it."""
    sizes = {"u32": 4, "int": 4, "u64": 8, "i64": 8, "Nic": ctypes.sizeof(generation.Nic)}
    body = re.search(rf"struct {name} {{.*?\n(.*?)\n}};", generation.source(), re.S)
    assert body is not None
    found = []
    for line in body[1].splitlines():
        kind, _, names = re.sub(r"//.*", "", line).strip().rstrip(";").replace("const ", "").partition(" ")
        for word in filter(None, names.split(", ")):
            plain, _, count = word.lstrip("*").partition("[")
            found.append((plain, (8 if "*" in kind + word else sizes[kind]) * int(count.rstrip("]") or 1)))
    return found


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("Mail", nic_words.Mail), ("Host", report.Words), ("Nic", generation.Nic), ("SendArgs", arguments.Send),
        ("RecvArgs", arguments.Recv), ("BackArgs", arguments.Back), ("SumArgs", arguments.Sum),
    ],
)  # fmt: skip
def test_structures_are_those_of_the_kernels(name: str, here: type[ctypes.Structure]) -> None:
    assert fields(name) == [(field[0].rstrip("_"), ctypes.sizeof(field[1])) for field in here._fields_]


def test_sizes_are_those_of_the_kernels() -> None:
    assert sum(size for _, size in fields("Mail")) == layout.MAIL
    local = fields("Local")
    assert sum(size for _, size in local) <= layout.LOCAL
    assert local[:4] == [("epoch", 64), ("done", 8), ("broken", 4), ("unreachable", 4)]
    assert generation.UNREACHABLE_AT == 64 + 8 + 4


def test_memory_of_known_shapes() -> None:
    """Far below 4 GB with 4,096 tokens of each of 64 ranks, if room for twice the even load is enough."""
    gib = 2**30
    decode = layout.NicLayout.of(MoeConfig(ranks=64, max_tokens=128, **V3)).memory()
    even = layout.NicLayout.of(MoeConfig(ranks=64, max_tokens=4096, shared_rows=32768, **V3)).memory()
    assert decode["total"] < 0.5 * gib
    assert even["total"] < 4 * gib
    for found in (decode, even):
        assert found["total"] == sum(size for name, size in found.items() if name != "total")


@pytest.mark.parametrize(
    ("change", "words"),
    [({"ranks": 65, "experts": 65}, "ranks=65"), ({"topk": 129}, "topk=129"), ({"experts": 8193}, "experts=8193"),
     ({"out_dtype": "float64", "dtype": "float64"}, "float64"),
     ({"max_tokens": 1 << 24, "topk": 128, "experts": 128, "hidden": 1}, "max_tokens=16777216 with topk=128")],
)  # fmt: skip
def test_shapes_that_kernels_do_not_take(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layout.NicLayout.of(MoeConfig(**{**SHAPE, **change}))


@pytest.mark.skipif(kernels.NATIVE is None, reason="fabric-moe was built without its C part")
def test_what_is_not_there_is_said(engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    nic_standin.install(monkeypatch.setattr)
    config = MoeConfig(**{**SHAPE, "ranks": 1})
    with pytest.raises(ConfigError, match="through='wire'"):
        MoeGroup.open(engines[0], config, 0, Table(), device="cuda:0", through="wire")
    with (
        pytest.raises(StepError, match="no step"),
        MoeGroup.open(engines[0], config, 0, Table(), device="cuda:0", through="engine") as group,
    ):
        group.dispatch_recv(torch.zeros(1))
    monkeypatch.setattr(kernels, "NATIVE", None)
    with pytest.raises(Unsupported, match="C part"):
        MoeGroup.open(engines[0], config, 0, Table(), device="cuda:0", through="engine")


@pytest.mark.skipif(kernels.NATIVE is None, reason="fabric-moe was built without its C part")
@pytest.mark.parametrize(("backend", "ordering"), [("local", None), ("ibverbs", 0), ("ibverbs", 100)])
def test_a_gpu_that_does_not_order_the_writes_of_nics_is_refused(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch, backend: str, ordering: int | None
) -> None:
    device: Any = nic_standin.install(monkeypatch.setattr)

    def call(name: str, out: Any, *which: Any) -> None:
        if name == "cuDeviceGetAttribute":
            assert which[0] == 118
            out._obj.value = ordering

    device.call = call
    with monkeypatch.context() as patch:
        patch.setattr(engines[0], "backend", backend)
        if ordering == 0:
            with pytest.raises(Unsupported, match=r"cuda:0: .* need a flush .* 100 is wanted"):
                NicGeneration(engines[0], MoeConfig(**{**SHAPE, "ranks": 1}), 0, 0, [0], "cuda:0")
        else:
            NicGeneration(engines[0], MoeConfig(**{**SHAPE, "ranks": 1}), 0, 0, [0], "cuda:0").close()
    assert device.held == 0


@pytest.mark.skipif(kernels.NATIVE is None, reason="fabric-moe was built without its C part")
def test_what_cannot_be_counted_by_the_kernels_is_refused(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    nic_standin.install(monkeypatch.setattr)
    config = MoeConfig(**{**SHAPE, "ranks": 1})
    with MoeGroup.open(engines[0], config, 0, Table(), device="cuda:0", through="engine") as group:
        step = group.dispatch_send(torch.zeros((1, 40), dtype=torch.bfloat16), torch.zeros((1, 3), dtype=torch.int64))
        with pytest.raises(BadRange, match=r"alignment=4294967297: .* lower it"):
            group.dispatch_recv(step).contiguous(alignment=(1 << 32) + 1, capacity=9)
        text = group.generation.card()
        assert Card.read(text, config, 0, (0,)).rank == 0
        first = group.generation._imms[0][0]
        wrong = text.replace(f'"imms":[[{first},', f'"imms":[[{1 << 29},')
        with pytest.raises(ProtocolError, match="an immediate that is none"):
            Card.read(wrong, config, 0, (0,))


@pytest.mark.skipif(kernels.NATIVE is None, reason="fabric-moe was built without its C part")
def test_memory_that_cannot_be_freed_keeps_nothing_else(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = nic_standin.install(monkeypatch.setattr)
    free, failed = device.free, [0]

    def fails_once(at: int) -> None:
        if not failed[0]:
            failed[0] = at
            raise BackendError("cuMemFree_v2: no")
        free(at)

    monkeypatch.setattr(device, "free", fails_once)
    layout_of = layout.NicLayout.of(MoeConfig(**{**SHAPE, "ranks": 1}))
    NicMemory(engines[0], device, "cpu", layout_of).release()
    assert device.held == 1
    held = NicMemory(engines[0], device, "cpu", layout_of)
    with monkeypatch.context() as patch:
        patch.setattr(MrHandle, "close", refuses)
        held.release()
        held.release()  # what a NIC may still use is not freed the second time either
    assert device.held == 5


def refuses(handle: MrHandle, timeout: float | None = None) -> None:
    raise QueueFull(f"{handle!r} is still the source of transfers")


def test_shared_memory_near_the_limit_is_asked_for_beyond_it() -> None:
    """A kernel's own words count too, and a driver refuses 48 KiB in all unless its limit is raised."""
    asked: list[int] = []
    kernel = SimpleNamespace(launch=lambda grid, block, shared, *rest: asked.append(shared))
    gen: Any = SimpleNamespace(kernels={"moe_nic_count": kernel}, stream=lambda: 0)
    for shared in (100, 40 << 10, (48 << 10) - 8, 60 << 10):
        halves._launch(gen, "count", generation.Nic(), shared=shared)
    assert asked == [100, 40 << 10, (48 << 10) + 16, 60 << 10]


@pytest.mark.parametrize(("noted", "words"), [(0, "own engine did not"), (2, "gave up because of this one")])
def test_a_rank_that_is_named_hears_by_whom(noted: int, words: str) -> None:
    said, mail = report.Words(lost=1, culprits=1 << 1), nic_words.Mail(noted=noted)
    memory: Any = SimpleNamespace(words=ctypes.addressof(said), mail=ctypes.addressof(mail))
    assert words in str(NicReport(memory, 1, 8, {}).error())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_kernels_compile(arch: str) -> None:
    """For each kind of GPU, which need not be there."""
    try:
        nvrtc._nvrtc()
    except Unsupported as error:
        pytest.skip(str(error))
    for more in ({}, {"scale_bytes": 6, "dtype": "float8_e4m3fn", "wire_dtype": "float16"}, {"experts": 3}):
        macros = layout.NicLayout.of(MoeConfig(**{**SHAPE, **more})).macros()
        options = [*nvrtc._OPTIONS, f"--gpu-architecture={arch}", *(f"-D{name}={n}" for name, n in macros.items())]
        assert len(nvrtc._compile(generation.source(), options)) > 10_000


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_proxy_alone_under_a_sanitizer(tmp_path: Path, sanitizer: str) -> None:
    """tests/c/test_gpu.c: threads in place of kernels, an engine that is full now and then, writes that end late."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or not SOURCES.is_dir():
        pytest.skip("no C compiler, or no sources")
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-pthread"]
    flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{get_include()}", f"-I{SOURCES}"]
    files = [HERE / "c" / "test_gpu.c", *SOURCES.glob("*.c")]
    built = subprocess.run(
        [compiler, *flags, *map(str, files), "-o", str(tmp_path / "gpu")],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"no library for -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    for seed in ("1", "2", "3"):
        done = subprocess.run([str(tmp_path / "gpu"), seed], capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
