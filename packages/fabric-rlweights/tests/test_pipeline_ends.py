"""What a step of the pipeline that fails leaves behind, and what each step waits for."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parent))

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_world import Ways, make  # noqa: E402
from oracle import place, plain  # noqa: E402
from small_world import Small, small, until  # noqa: E402

from fabric_core import TransferEngine, WaitTimeout  # noqa: E402
from fabric_rlweights import quantise as quantising  # noqa: E402
from fabric_rlweights.dtensor import table_of  # noqa: E402
from fabric_rlweights.making import Maker  # noqa: E402
from fabric_rlweights.meta import EngineTable, Quant  # noqa: E402
from fabric_rlweights.sender import Sender  # noqa: E402
from fabric_rlweights.stage import HostStage  # noqa: E402
from fabric_rlweights.trainer import Trainer  # noqa: E402

LIMIT = 60.0


def _commit(ways: Ways, version: int) -> None:
    ways.fill(version)
    outcome = ways.trainer.push(version, timeout=LIMIT)
    assert outcome.committed, outcome
    assert ways.receiver.wait_version(version, LIMIT)
    ways.check(ways.receiver, ways.hooks, version)


@pytest.mark.parametrize("where", ["make", "_add"])
def test_a_piece_that_cannot_be_made_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    owner: Any = Maker if where == "make" else Sender
    with make("cpu", "cpu", watermark=600_000) as ways:
        _commit(ways, 1)
        sender = ways.trainer._sender
        assert sender is not None
        real = getattr(owner, where)
        for version in range(2, 6):  # what is lost adds up
            left = [3]

            def fails(*words: Any, left: list[int] = left) -> Any:
                left[0] -= where == "make" or words[3] is words[0].stage.room  # not of what is straight
                if left[0] == 0:
                    raise MemoryError("planted")
                return real(*words)

            monkeypatch.setattr(owner, where, fails)
            outcome = ways.trainer.push(version, timeout=LIMIT)
            assert not outcome.committed
            assert "planted" in outcome.reason
            monkeypatch.setattr(owner, where, real)
        _commit(ways, 6)
        assert sender.arena.used == 0


# ---- magnitudes


class _Stuck:
    """A transfer that ends when it is cancelled, and not before."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def cancel(self) -> None:
        self.over.set()

    def wait(self, timeout: float | None = None) -> None:
        if not self.over.wait(timeout):
            raise WaitTimeout("it is stuck")


def _halves(world: Small, *blocks: int) -> tuple[list[Trainer], Any, list[dict[str, Any]]]:
    """Two trainers whose border cuts blocks, their whole parameter, and a receiver's memory for each block size."""
    made, whole = [], torch.randn(200, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for rank in range(2):
        rows = whole[100 * rank : 100 * rank + 100].clone()
        table, buffers = table_of(rank, {"w": rows}, boxes={"w": (((100 * rank, 0), (100, 128)), (200, 128))})
        engine = world._stack.enter_context(TransferEngine.open())
        made.append(world._stack.enter_context(Trainer(engine, table, buffers, controller=world.engine.address)))
    held = []
    for rank, block in enumerate(blocks):
        places = -(-200 // block), -(-128 // block)
        tensors = (
            plain("w", (200, 128), "float8_e4m3fn", quant=Quant(scheme="block", scales="s", block=block)),
            plain("s", places, "float32"),
        )
        entries = (place("w", "w", (0, 0), (200, 128), (0, 0)),)
        given = {"w": torch.zeros(200, 128, dtype=torch.float8_e4m3fn), "s": torch.zeros(places)}
        world.receiver(EngineTable(rank=rank, tensors=tensors, entries=entries), given)
        held.append(given)
    world.controller.wait_ready(LIMIT)
    return made, whole, held


def test_ranks_with_blocks_of_two_sizes_get_each_their_own_scales() -> None:
    with small(trainers=2, receivers=2) as world:
        trainers, whole, held = _halves(world, 128, 64)
        with ThreadPoolExecutor(2) as threads:
            for outcome in threads.map(lambda trainer: trainer.push(1, timeout=LIMIT), trainers):
                assert outcome.committed, outcome
                assert not outcome.culprits, outcome
        for block, given in zip((128, 64), held, strict=True):
            for r, c in np.ndindex(*given["s"].shape):
                box = slice(r * block, r * block + block), slice(c * block, c * block + block)
                scale = whole[box].float().abs().amax().clamp(1e-4) / 448.0
                assert given["s"][r, c] == scale, (block, r, c)
                assert torch.equal(
                    given["w"][box].view(torch.uint8),
                    (whole[box].float() * (1.0 / scale)).to(torch.float8_e4m3fn).view(torch.uint8),
                )


def test_magnitudes_that_do_not_arrive_hold_nobody_who_is_told_to_stop() -> None:
    with small(trainers=2) as world:
        (one, other), _whole, _held = _halves(world, 128)
        stuck: list[_Stuck] = []
        real = one.engine.submit_single_write

        def submit(length: int, *words: Any, **more: Any) -> Any:
            if length == 4:  # one magnitude
                stuck.append(_Stuck())
                return stuck[-1]
            return real(length, *words, **more)

        one.engine.submit_single_write = submit  # type: ignore[method-assign]
        threads = [threading.Thread(target=t.push, args=(1,), kwargs={"timeout": LIMIT}) for t in (one, other)]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        until(lambda: stuck, "nobody sent magnitudes")
        other.close()
        for thread in threads:
            thread.join(LIMIT)
        assert time.monotonic() - begin < LIMIT / 2, "it waited for its whole time"
        assert stuck[0].over.is_set(), "it was left under way"


# ---- what is waited for, and where


class _Late:
    def __init__(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 3


def test_copies_of_a_gpu_to_host_memory_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with TransferEngine.open() as engine:
        stage = HostStage(engine, 0)
        assert stage.begin().query()
        late = _Late()
        stream = SimpleNamespace(record_event=lambda: late)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
        assert stage.begin() is late


def test_the_kernel_is_tried_on_the_gpu_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever GPU the thread uses: it is one of the package's own, so the first."""
    current = ["cuda:0"]

    @contextlib.contextmanager
    def device(name: str) -> Iterator[None]:
        before, current[0] = current[0], name
        yield
        current[0] = before

    tried: list[tuple[str, str]] = []

    def works_on(name: str) -> bool:
        tried.append((name, current[0]))
        return True

    monkeypatch.setitem(sys.modules, "fabric_rlweights.fp8_kernel", SimpleNamespace(works_on=works_on))
    import fabric_rlweights

    monkeypatch.setattr(fabric_rlweights, "fp8_kernel", sys.modules["fabric_rlweights.fp8_kernel"], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    quantising.kernel_on.cache_clear()
    try:
        assert quantising.kernel_on("cuda:3")
    finally:
        quantising.kernel_on.cache_clear()
    assert tried == [("cuda:3", "cuda:3")]
