"""The steps of an update that the host and a GPU share: made, then written, then given back, under the watermark.

Here the stage is the host's, with marks that are reached late, as a GPU's are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parent))

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from gpu_world import Ways, make  # noqa: E402

from fabric_core import BadRange, ConfigError, TransferEngine, Unsupported  # noqa: E402
from fabric_rlweights import sender as sending  # noqa: E402
from fabric_rlweights.digest import MASK, box_digest, run_digest  # noqa: E402
from fabric_rlweights.digest_torch import runs_digest  # noqa: E402
from fabric_rlweights.fetching import strips  # noqa: E402
from fabric_rlweights.meta import contiguous  # noqa: E402
from fabric_rlweights.quantise import magnitudes, quantise  # noqa: E402
from fabric_rlweights.stage import HostStage, device_for  # noqa: E402
from fabric_rlweights.tasks import Task, fit  # noqa: E402
from fabric_rlweights.views import check_served, device_name, torch_view  # noqa: E402
from fabric_rlweights.writes import Writes  # noqa: E402


class _LateMark:
    """Reached when it is asked for the `after`th time; then the work of before is done."""

    def __init__(self, after: int, work: list[Callable[[], None]]) -> None:
        self.after, self.work = after, work

    def query(self) -> bool:
        self.after -= 1
        if self.after > 0:
            return False
        while self.work:
            self.work.pop(0)()
        return True


class _LateStage(HostStage):
    """The room is a copy of what is made until a mark is reached: whatever is written before is spoiled."""

    device = "late"
    after = 3

    def __init__(self, engine: TransferEngine, nbytes: int) -> None:
        super().__init__(engine, nbytes)
        self.there = self.room
        self.room = np.zeros(nbytes, np.uint8)
        self.made: list[tuple[int, int]] = []

    def fetch(self, memory: Any, task: Task, at: int) -> Any:
        packed = contiguous(task.size, 4 if task.source == "float32" else 2)
        into = torch_view(self.room, task.source, at, task.size, packed)
        into.copy_(torch_view(memory, task.source, task.offset, task.size, task.stride))
        return into

    def mark(self) -> Any:
        room, there = self.room, self.there

        def arrive() -> None:
            there[:] = room

        return _LateMark(self.after, [arrive])


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[_LateStage]:
    """Have trainers make their pieces on a stage that is late, from fetched sources."""
    made = type("Late", (_LateStage,), {"after": 3})
    monkeypatch.setattr(sending, "device_for", lambda *_: "late")
    monkeypatch.setattr(sending, "fused_on", lambda _: False)
    monkeypatch.setattr(sending, "open_stage", lambda engine, _device, nbytes: made(engine, nbytes))
    return made


def _commit(ways: Ways, version: int) -> Any:
    ways.fill(version)
    outcome = ways.trainer.push(version, timeout=60)
    assert outcome.committed, outcome
    assert ways.receiver.wait_version(version, 60)
    ways.check(ways.receiver, ways.hooks, version)
    return outcome


@pytest.mark.parametrize("watermark", [600_000, 1 << 20, 1 << 24])
def test_nothing_is_written_before_its_mark_and_the_watermark_holds(late: Any, watermark: int) -> None:
    with make("cpu", "cpu", watermark=watermark, piece_bytes=1 << 16) as ways:
        for version in (1, 2):
            outcome = _commit(ways, version)
            assert 0 < outcome.stats.peak <= watermark
            assert outcome.stats.fetched > 0
        sender = ways.trainer._sender
        assert sender is not None
        assert sender.stage.device == "late"
        assert sender.arena.used == 0


def test_progress_ends_with_everything_though_pieces_are_late(late: Any) -> None:
    seen: list[tuple[int, int]] = []
    with make("cpu", "cpu") as ways:
        ways.fill(1)
        outcome = ways.trainer.push(1, timeout=60, progress=lambda done, total: seen.append((done, total)))
    assert outcome.committed, outcome
    assert seen == sorted(seen)
    assert seen[-1][0] == outcome.stats.bytes >= seen[-1][1]


def test_an_update_broken_off_while_pieces_are_made_leaves_no_memory_taken(
    late: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make("cpu", "cpu") as ways:
        _commit(ways, 1)
        late.after = 10**9  # never reached
        outcome = ways.trainer.push(2, timeout=1.0)
        assert not outcome.committed
        assert outcome.culprits == ("trainer 0",)
        assert re.search("late had not done what it was given|did not finish in time", outcome.reason)  # who is first
        sender = ways.trainer._sender
        assert sender is not None
        assert sender._making
        late.after = 3
        for mark, *_ in sender._making:
            mark.after = 3  # type: ignore[attr-defined]
        _commit(ways, 3)
        assert sender.arena.used == 0


def test_a_write_that_cannot_be_posted_leaves_no_memory_taken(late: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make("cpu", "cpu") as ways:
        _commit(ways, 1)
        whole = Writes.post
        count = [0]

        def post(self: Writes, *words: Any) -> Any:
            count[0] += 1
            if count[0] == 4:
                raise OSError("planted")
            return whole(self, *words)

        monkeypatch.setattr(Writes, "post", post)
        outcome = ways.trainer.push(2, timeout=60)
        assert not outcome.committed
        assert "planted" in outcome.reason
        monkeypatch.setattr(Writes, "post", whole)
        _commit(ways, 3)
        sender = ways.trainer._sender
        assert sender is not None
        assert sender.arena.used == 0


def test_what_a_task_takes_covers_its_source_and_what_a_gpu_does_not_need_is_left_out() -> None:
    with make("cpu", "cpu") as ways:
        sender = ways.trainer._sender
        assert sender is not None
        copied = [task for task in sender.tasks if task.copied]
        before = [task.temporary for task in copied]
        works = [task.work for task in copied]
        fit(sender.tasks, fetched={task.buffer for task in copied}, fused=True)
        for task, had, work in zip(copied, before, works, strict=True):
            item = {"float32": 4, "bfloat16": 2, "float16": 2}[task.source]
            assert task.fetched == np.prod(task.size) * item
            assert task.temporary == had - -(-work // 64) * 64 + -(-task.fetched // 64) * 64
            places = [0, *task.places]
            parts = [task.nbytes, task.scale_bytes, task.work, task.fetched]
            assert all(b - a >= n for a, b, n in zip(places, places[1:], parts, strict=False))
        assert all(task.temporary == 0 for task in sender.tasks if not task.copied)


# ---- refusals


def test_devices_that_cannot_be_served_are_named_with_the_cure() -> None:
    with pytest.raises(BadRange, match=r"a tensor on meta: .* copy it"):
        device_name(torch.empty(1, device="meta"))
    with TransferEngine.open() as engine:
        with pytest.raises(
            Unsupported, match=r"w is on cuda:1, the engine serves cpu: open it with .*open\('cuda:1'\)"
        ):
            check_served(engine, "cuda:1", "w")
        check_served(engine, "cpu", "w")
        there = [SimpleNamespace(device=torch.device("cuda", k)) for k in (1, 0, 1)]
        with pytest.raises(ConfigError, match="lie on cuda:0 and cuda:1: have a trainer"):
            device_for(engine, there)
        assert device_for(engine, [*there[::2], np.zeros(1, np.uint8)]) == "cuda:1"
        assert device_for(engine, [np.zeros(1, np.uint8)]) == "cpu"


# ---- parts of a GPU's steps that are plain arithmetic


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 12), st.integers(1, 12), st.integers(0, 9), st.integers(0, 9),
    st.sampled_from([0, 1, 3, 4]), st.integers(0, 1 << 20),
)  # fmt: skip
def test_magnitudes_and_numbers_are_those_of_single_blocks(
    n: int, rows: int, columns: int, row: int, column: int, block: int, seed: int
) -> None:
    """Block by block, element by element, for any first row and column."""
    x = torch.randn(n, rows, columns, generator=torch.Generator().manual_seed(seed))
    found = magnitudes(x, row, column, block)
    blocks: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for i, j, k in np.ndindex(n, rows, columns):
        key = (i, (row + j) // block - row // block, (column + k) // block - column // block) if block else (0, 0, 0)
        blocks.setdefault(key, []).append((i, j, k))
    assert found.numel() == len(blocks)
    out = torch.zeros(n, rows, columns, dtype=torch.float8_e4m3fn)
    quantise(x, found, out, torch.zeros(128 * columns), row, column, block)
    for key, elements in blocks.items():
        largest = max(abs(x[element]) for element in elements)
        assert found[key] == largest
        scale = largest.clamp(1e-4) / 448.0
        for element in elements:
            assert out[element].float() == (x[element] * (1.0 / scale)).to(torch.float8_e4m3fn).float()


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=12))
def test_strips_are_the_runs_in_their_order(steps: list[tuple[int, int]]) -> None:
    source, target = (np.cumsum([step[k] for step in steps]) for k in range(2))
    found = strips(source, target)
    runs = [(s.source + k * s.source_step, s.target + k * s.target_step) for s in found for k in range(s.runs)]
    assert runs == list(zip(source.tolist(), target.tolist(), strict=True))


def test_rows_at_one_distance_are_one_strip() -> None:
    rows = np.arange(4)[:, None] * 1000 + np.arange(8) * 64
    assert len(strips(rows[0], np.arange(8) * 16)) == 1
    assert len(strips(rows.ravel(), np.arange(32) * 16)) == 4


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.sampled_from([1, 2, 4, 8]), st.integers(0, 1 << 20))
def test_torchs_digest_is_numpys(rows: int, length: int, item: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, rows * length * item * 2, dtype=np.uint8)
    places = np.random.default_rng(seed).permutation(rows * 2)[:rows].astype(np.int64) * length * item
    index = np.arange(rows, dtype=np.int64) * length + seed
    want = 0
    for place, first in zip(places.tolist(), index.tolist(), strict=True):
        run = data[place : place + length * item].reshape(1, -1)
        want += run_digest(run, item, np.array([first], np.int64))
    found = runs_digest(torch.from_numpy(data), item, places, index, length * item)
    assert int(found) & MASK == want & MASK


def test_torchs_digest_of_a_box_longer_than_what_it_takes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from fabric_rlweights import digest_torch

    monkeypatch.setattr(digest_torch, "CHUNK", 100)
    data = np.random.default_rng(0).integers(0, 256, 37 * 230 * 2, dtype=np.uint8)
    strides = (460, 2)
    for size in ((37, 230), (37, 130), (1, 230), (37, 3)):
        assert box_digest(torch.from_numpy(data), 0, size, strides, 2) == box_digest(data, 0, size, strides, 2)
