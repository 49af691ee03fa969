"""verl's own registry, base class and order of calls, over processes.

`make test-engines` runs it; verl 0.9.1 was tried.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl.checkpoint_engine", reason="make test-engines runs it")

sys.path.append(str(Path(__file__).parent))  # pytest's importlib mode does not find its neighbours by itself

import verl_rank  # noqa: E402
from stream_world import a_world, same, some_weights  # noqa: E402
from verl.checkpoint_engine import (  # type: ignore[import-not-found]  # noqa: E402
    CheckpointEngine,
    CheckpointEngineRegistry,
)

from fabric_rlweights.stream import receive  # noqa: E402
from fabric_rlweights.verl import FabricCheckpointEngine  # noqa: E402

LIMIT = 100.0  # seconds: the longest that anything may take which is meant to work
FORKS = multiprocessing.get_context("fork")  # importing verl takes half a minute: once is enough


class Rank:
    """A process that is a worker of verl's."""

    def __init__(self, actor: bool) -> None:
        self.pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=verl_rank.serve, args=(theirs, actor), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, word: str, given: Any = None) -> None:
        self.pipe.send((word, given))

    def hear(self) -> Any:
        assert self.pipe.poll(LIMIT), "no answer"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(LIMIT)
        self.pipe.close()


class Workers:
    """Actors and rollouts, called as verl's CheckpointEngineManager calls them."""

    def __init__(self, actors: int, rollouts: int) -> None:
        self.actors = [Rank(True) for _ in range(actors)]
        self.rollouts = [Rank(False) for _ in range(rollouts)]

    @property
    def all(self) -> list[Rank]:
        return self.actors + self.rollouts

    def call(self, words: list[tuple[str, Any]]) -> list[Any]:
        for rank, (word, given) in zip(self.all, words, strict=True):
            rank.tell(word, given)
        return [rank.hear() for rank in self.all]

    def build(self) -> list[Any]:
        """verl's build_process_group; return what `prepare` said."""
        metadata = self.call([("prepare", None)] * len(self.all))
        sides = FabricCheckpointEngine.build_topology(len(self.actors), len(self.rollouts), metadata)
        kwargs = []
        for side, ranks in zip(sides, (self.actors, self.rollouts), strict=True):
            assert all(len(values) == len(ranks) for values in side.values())  # verl asserts the same
            kwargs += [{name: values[rank] for name, values in side.items()} for rank in range(len(ranks))]
        assert self.call([("join", given) for given in kwargs]) == [None] * len(self.all)
        return metadata

    def move(self, step: int) -> list[Any]:
        return self.call([("send", step)] * len(self.actors) + [("take", step)] * len(self.rollouts))

    def update(self, step: int) -> list[Any]:
        self.build()
        found = self.move(step)
        assert self.call([("finalize", None)] * len(self.all)) == [None] * len(self.all)
        return found


@pytest.fixture
def workers() -> Iterator[Workers]:
    started = Workers(2, 2)
    yield started
    for rank in started.all:
        rank.kill()


def test_three_updates_over_four_processes(workers: Workers) -> None:
    weights = some_weights(0)
    for step in range(3):
        first, second, *rollouts = workers.update(step)
        assert rollouts == [len(weights)] * 2
        assert first["fabric/update_bytes"] == sum(t.numel() * t.element_size() for _, t in weights)
        assert second == {}


def test_a_rollout_that_dies_is_named_and_ends_it(workers: Workers) -> None:
    assert workers.update(1)[2:] == [9, 9]
    metadata = workers.build()
    workers.rollouts.pop().kill()
    for answer in workers.move(2)[:2]:
        assert isinstance(answer, str), answer
        assert answer.startswith("StreamFailed: "), answer
        assert metadata[3]["address"].partition("#")[0] in answer, answer
    workers.call([("finalize", None)] * 3)
    workers.rollouts.append(Rank(False))  # and the next update, with another one in its place, is right
    assert workers.update(3)[2:] == [9, 9]


def test_tensors_may_be_kept_as_verl_keeps_them() -> None:
    """verl's adapter for SGLang collects tensors over several of our buckets: it copies those that are views."""
    buckets = pytest.importorskip("verl.workers.rollout.sglang_rollout.utils").get_named_tensor_buckets
    weights = some_weights(4) * 4

    async def keeps(member: Any) -> list[tuple[str, Any]]:
        return [pair async for bucket in buckets(receive(member), 1 << 30) for pair in bucket]

    with a_world(1, 1) as world:
        assert same(world.update([weights], keeps)[1], weights)


def test_it_is_verls_own_class() -> None:
    assert CheckpointEngineRegistry.get("fabric") is FabricCheckpointEngine
    assert issubclass(FabricCheckpointEngine, CheckpointEngine)
    assert not getattr(FabricCheckpointEngine, "__abstractmethods__", None)
    assert FabricCheckpointEngine.wire_format == "named_tensors"
