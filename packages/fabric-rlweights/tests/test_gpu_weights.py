"""Weights on a GPU, on one: what is written is what a CPU makes, from the GPU's and from host memory, to either.

`pytest -m gpu`. The steps of the pipeline, which a GPU and the host share, are tested without one in test_pipeline.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_world import Ways, make, parameters, same  # noqa: E402

from fabric_core import ConfigError, TransferEngine, Unsupported  # noqa: E402
from fabric_rlweights import quantise as quantising  # noqa: E402
from fabric_rlweights.dtensor import table_of  # noqa: E402
from fabric_rlweights.job.device_model import memory_for  # noqa: E402
from fabric_rlweights.quantise import fused_on, kernel_on, magnitudes, quantise, scales  # noqa: E402
from fabric_rlweights.receiver import Receiver  # noqa: E402
from fabric_rlweights.trainer import Trainer  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"),
]
CUDA = "cuda:0"


def _push(ways: Ways, version: int) -> Any:
    ways.fill(version)
    outcome = ways.trainer.push(version, timeout=60)
    assert outcome.committed, outcome
    assert ways.receiver.wait_version(version, 60)
    return outcome


# ---- quantising


@pytest.mark.parametrize("how", ["kernel", "one operation", "by way of float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("block", [128, 0])
def test_quantised_bits_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch, how: str, dtype: Any, block: int) -> None:
    if how == "kernel" and (not block or not kernel_on(CUDA)):
        pytest.skip(
            "there is a kernel for blocks of 128 only" if not block else "no Triton, or it makes other bits here"
        )
    if how == "one operation" and not fused_on(CUDA):
        pytest.skip("this torch does not convert to fp8 on the way")
    if how != "kernel":
        monkeypatch.setattr(quantising, "kernel_on", lambda _device: False)
    if how == "by way of float32":
        monkeypatch.setattr(quantising, "fused_on", lambda _device: False)
    generator = torch.Generator().manual_seed(5)
    cuts = ((3, 300, 260), 0, 0), ((1, 500, 700), 100, 37), ((1, 1, 1), 127, 5), ((2, 256, 512), 128, 384)
    for shape, row, column in cuts:
        x = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-7, 4, shape, generator=generator)
        x = x.to(dtype)
        x[:, :2] = 0
        found = []
        for device in ("cpu", CUDA):
            there = x.to(device)
            largest = magnitudes(there, row, column, block)
            out = torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device)
            work = torch.zeros(128 * shape[2], device=device)
            made = quantise(there, largest, out, work, row, column, block)
            own = torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device)
            again = quantise(there, None, own, work, row, column, block)
            found.append([part.cpu() for part in (largest, scales(largest), made.view(largest.shape), out, again, own)])
        for name, mine, theirs in zip(
            ("largest", "scales", "made", "fp8", "own scales", "own fp8"), *found, strict=True
        ):
            same(name, mine, theirs)
        same("own", found[0][3], found[0][5])


def test_scales_of_every_magnitude_are_those_of_the_cpu() -> None:
    """All bfloat16 from 1e-4 up: a division by way of the reciprocal is wrong in a part of them."""
    largest = torch.arange(0x38D2, 0x7F7F, dtype=torch.int16).view(torch.bfloat16).float()
    same("scales", scales(largest.to(CUDA)), scales(largest))
    made = []
    for device in ("cpu", CUDA):
        x = largest[:512].to(device).view(512, 1, 1).expand(512, 128, 128)
        out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=device)
        made.append((quantise(x, None, out, torch.empty(128 * 128, device=device), 0, 0, 128).cpu(), out.cpu()))
    for name, mine, theirs in zip(("scales", "fp8"), *made, strict=True):
        same(name, mine, theirs)


# ---- updates


@pytest.mark.parametrize("double", [False, True], ids=["in place", "double buffer"])
@pytest.mark.parametrize("receiver", [CUDA, "cpu"])
@pytest.mark.parametrize("trainer", [CUDA, "pinned", "cpu"])
def test_every_byte(trainer: str, receiver: str, double: bool) -> None:
    with make(trainer, receiver, double_buffer=double, engine=CUDA) as ways:
        for version in (1, 2):
            outcome = _push(ways, version)
            ways.check(ways.receiver, ways.hooks, version)
        wanted = ["pause", "exchange", "resume"] if double else ["pause", "resume"]
        assert ways.hooks.calls == wanted * 2
        assert 0 < outcome.stats.straight < outcome.stats.bytes
        assert (outcome.stats.fetched > 0) == (trainer != CUDA)
        assert ways.trainer._sender is not None
        assert ways.trainer._sender.stage.device == CUDA


def test_a_late_receiver_gets_its_weights_from_one_on_a_gpu() -> None:
    with make(CUDA, CUDA) as ways:
        _push(ways, 1)
        receiver, hooks = ways.late(1)
        assert receiver.wait_version(1, 60)
        ways.check(receiver, hooks, 1)
        _push(ways, 2)
        ways.check(receiver, hooks, 2)


@pytest.mark.parametrize("trainer", [CUDA, "cpu"])
@pytest.mark.parametrize("watermark", [1 << 18, 1 << 20, 1 << 22])
def test_memory_of_the_gpu_stays_under_the_watermark(watermark: int, trainer: str) -> None:
    piece = 1 << 14 if watermark < 1 << 20 else 1 << 16
    # without digests, which take memory of their own
    with make(trainer, CUDA, watermark=watermark, piece_bytes=piece, engine=CUDA, digests=False) as ways:
        _push(ways, 1)
        ways.fill(2)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outcome = ways.trainer.push(2, timeout=60)
        assert outcome.committed, outcome
        assert 0 < outcome.stats.peak <= watermark
        # the watermark's memory was there before; beside it there are magnitudes and factors, a number for each block
        assert torch.cuda.max_memory_allocated() - before <= 1 << 17


def test_what_the_callers_stream_was_given_before_is_what_is_sent() -> None:
    """Straight and made pieces: the stream is still at the old weights when push() begins."""
    with make(CUDA, CUDA) as ways:
        _push(ways, 1)
        new = {name: tensor.to(CUDA) for name, tensor in parameters("cpu", 2).items()}
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)  # cycles: 0.2 s
            for name, tensor in new.items():
                ways.parameters[name].copy_(tensor)
            outcome = ways.trainer.push(2, timeout=60)
        assert outcome.committed, outcome
        assert ways.receiver.wait_version(2, 60)
        ways.check(ways.receiver, ways.hooks, 2)


def test_a_gpu_that_is_late_ends_the_update_and_the_next_one_works() -> None:
    with make(CUDA, CUDA) as ways:
        _push(ways, 1)
        torch.cuda._sleep(6_000_000_000)  # cycles: 3 s
        outcome = ways.trainer.push(2, timeout=0.5)
        assert not outcome.committed
        assert outcome.culprits == ("trainer 0",), outcome
        assert not torch.cuda.current_stream().query(), "it waited for the GPU"
        torch.cuda.synchronize()
        _push(ways, 3)
        ways.check(ways.receiver, ways.hooks, 3)


def test_many_small_arrays_of_the_heap_share_pages_and_arrive() -> None:
    """Pinned page by page, some registrations cannot be pinned: the driver refuses copies that leave a pin."""
    from contextlib import ExitStack

    from oracle import place, plain

    from fabric_rlweights.controller import Controller
    from fabric_rlweights.meta import EngineTable

    count, side = 40, 33
    sources = {f"p{k}": np.full((side, side), k + 1, np.float32) for k in range(count)}
    wanted = EngineTable(
        rank=0,
        tensors=tuple(plain(name, (side, side), "bfloat16") for name in sources),
        entries=tuple(place(name, name, (0, 0), (side, side), (0, 0)) for name in sources),
    )
    described, memory = memory_for(wanted, CUDA)
    with ExitStack() as stack:
        home = stack.enter_context(TransferEngine.open())
        controller = stack.enter_context(Controller(home, trainers=1, receivers=1))
        engines = [stack.enter_context(TransferEngine.open(CUDA)) for _ in range(2)]
        trainer = stack.enter_context(Trainer(engines[0], *table_of(0, sources), controller=home.address))
        stack.enter_context(Receiver(engines[1], described, memory, controller=home.address))
        controller.wait_ready(60)
        outcome = trainer.push(1, timeout=60)
        assert outcome.committed, outcome
        assert outcome.stats.fetched == count * side * side * 4
        for k in range(count):
            assert (memory[f"p{k}"] == k + 1).all()


# ---- refusals


def test_memory_of_a_gpu_that_the_engine_does_not_serve_is_refused_with_the_cure() -> None:
    with TransferEngine.open() as engine:
        described, buffers = table_of(0, {"w": torch.zeros(4, 4, device=CUDA)})
        with pytest.raises(Unsupported, match=r"buffer 0 is on cuda:0, the engine serves cpu: .*open\('cuda:0'\)"):
            Trainer(engine, described, buffers, controller="local:nobody")
        from oracle import place, plain

        from fabric_rlweights.meta import EngineTable

        wanted = EngineTable(
            rank=0, tensors=(plain("w", (4, 4), "float32"),), entries=(place("w", "w", (0, 0), (4, 4), (0, 0)),)
        )
        with pytest.raises(Unsupported, match=r"given for w is on cuda:0"):
            Receiver(engine, wanted, {"w": torch.zeros(4, 4, device=CUDA)}, controller="local:nobody")


def test_a_piece_that_does_not_fit_with_its_source_names_both_numbers() -> None:
    with (
        pytest.raises(ConfigError, match=r"bytes of temporary memory .* the watermark is 65536"),
        make("cpu", CUDA, watermark=1 << 16, piece_bytes=1 << 20),
    ):
        pass
