"""How an update ends when a rank cannot do its part: at once, by name, and the next one works."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parent))

import pytest
from small_world import N, small, until

from fabric_rlweights import donation, presence
from fabric_rlweights.sender import Sender
from fabric_rlweights.weights import Weights

LIMIT = 60.0


def test_digests_that_cannot_be_computed_end_the_update_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise MemoryError("planted")

    with small(digests=True) as world:
        world.trainer()
        receiver = world.receiver(0, double_buffer=True)
        world.commit(1)
        monkeypatch.setattr(Weights, "digests", fails)
        begin = time.monotonic()
        outcome = world.push(2, timeout=LIMIT)[0]
        assert time.monotonic() - begin < LIMIT / 2, "it waited for its whole time"
        assert not outcome.committed
        assert outcome.culprits == ("receiver 0",)
        assert "planted" in outcome.reason
        assert receiver.version == 1
        assert receiver.serving
        monkeypatch.undo()
        world.commit(3)


def test_a_peer_that_cannot_give_its_weights_away_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_bytes(_blob: bytes) -> Any:
        raise IndexError("planted")

    told: list[Any] = []
    real = donation.Sent

    def sent(*words: Any) -> Any:
        told.append(words)
        return real(*words)

    with small() as world:
        world.trainer()
        world.receiver(0)
        world.commit(1)
        monkeypatch.setattr(donation, "Sent", sent)
        monkeypatch.setattr(donation, "MrDesc", SimpleNamespace(from_bytes=from_bytes))
        late = world.receiver(1)
        until(lambda: told, "the donor said nothing")
        assert "planted" in told[0][2]
        monkeypatch.undo()
        world.commit(2)
        assert late.wait_version(2, LIMIT)


def test_a_plan_that_could_not_be_taken_up_is_said_at_once_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [True]
    real = Weights.take_up

    def take_up(self: Weights, message: Any) -> None:
        if short[0]:
            raise MemoryError("planted")
        real(self, message)

    monkeypatch.setattr(Weights, "take_up", take_up)
    with small() as world:
        world.trainer()
        world.receiver(0)
        until(lambda: "planted" in world.controller.problem, "nobody said why")
        begin = time.monotonic()
        outcome = world.push(1, timeout=LIMIT)[0]
        assert time.monotonic() - begin < LIMIT / 2, "it waited for its whole time"
        assert not outcome.committed
        assert outcome.culprits == ("receiver 0",)
        assert "planted" in outcome.reason
        short[0] = False
        world.commit(2)


def test_trainers_that_could_not_take_up_the_plan_try_again_with_the_next_push(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [True]

    def made(*words: Any, **more: Any) -> Sender:
        if short[0]:
            raise MemoryError("planted")
        return Sender(*words, **more)

    monkeypatch.setattr(presence, "Sender", made)
    with small(trainers=2) as world:
        first, second = world.trainer(0, 2), world.trainer(1, 2)
        world.receiver(0)
        until(lambda: first.problem and second.problem, "they took up the plan")
        short[0] = False
        world.commit(1)


@pytest.mark.parametrize("double", [False, True])
def test_who_serves_on_after_a_failed_update_gives_its_version_to_late_ones(double: bool) -> None:
    with small(trainers=2) as world:
        first, _ = world.trainer(0, 2), world.trainer(1, 2)
        one = world.receiver(0, double_buffer=double)
        world.commit(1)
        outcome = first.push(2, timeout=1.0)  # the other one pushes nothing
        assert not outcome.committed
        until(lambda: 2 in world.controller.reports, "no report")
        assert one.serving
        late = world.receiver(1)
        assert late.wait_version(1, LIMIT)
        assert late.tensors["w"].view("<u2").tolist() == [1] * (N * N)


def test_hooks_run_where_the_weights_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    entered: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda name: entered.append((threading.current_thread().name, name)))
    real = Weights.__init__

    def init(self: Weights, *words: Any, **more: Any) -> None:
        real(self, *words, **more)
        self._device = "cuda:1"

    monkeypatch.setattr(Weights, "__init__", init)
    with small() as world:
        world.receiver(0)
        until(lambda: entered, "the thread uses the first GPU")
    assert entered == [("fabric-rl-receiver0", "cuda:1")]
