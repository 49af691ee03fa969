"""Ranks come, go and are slow between updates: what is served stays what it is, and nobody healthy is stopped."""

from __future__ import annotations

import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import numpy as np
import pytest
from oracle import place, plain
from small_world import N, Noted, engine_table, memory, small, trainer_table, until

from fabric_core import NetAddr, TransferEngine
from fabric_rlweights import ending
from fabric_rlweights.attempt import NotCommitted
from fabric_rlweights.late import _alike
from fabric_rlweights.members import Member, Members
from fabric_rlweights.meta import EngineTable
from fabric_rlweights.plan import Options
from fabric_rlweights.protocol import Abort, Begin, Call, Message, Offer, Quiet, Ready, Result, Resumed, Stop
from fabric_rlweights.receiver import Receiver
from fabric_rlweights.updates import Updates


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_HEARTBEAT", "5")


def values(receiver: Receiver, name: str = "w") -> list[int]:
    return np.unique(receiver.tensors[name].view(np.uint16)).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("updates_before", [1, 2, 3])
def test_a_replan_changes_nothing_of_what_a_double_buffer_serves(updates_before: int) -> None:
    hooks = Noted()
    with small() as job:
        job.trainer()
        first = job.receiver(0, hooks=hooks, double_buffer=True)
        for version in range(1, updates_before + 1):
            job.commit(version)
        late = job.receiver(1)
        assert late.wait_version(updates_before, 120)
        assert values(first) == values(late) == [updates_before]
        assert np.unique(hooks.used["w"].view(np.uint16)).tolist() == [updates_before]
        assert first.serving
        job.commit(9)
        assert values(first) == values(late) == [9]
        assert np.unique(hooks.used["w"].view(np.uint16)).tolist() == [9]


def test_a_late_receiver_gets_copies_that_the_engine_makes_its_tensors_of() -> None:
    """Layout staging, and a parameter that falls back."""

    def table(rank: int) -> EngineTable:
        made = engine_table(rank, ("w",), "staging")
        return made.model_copy(update={"fallback": {"x": "its loader computes"}})

    hooks, late_hooks = Noted(), Noted()
    with small() as job:
        job.trainer(names=("w", "x"))
        job.receiver(table(0), {}, hooks=hooks)
        for version in (1, 2, 3):
            job.commit(version)
            assert {name: np.unique(bits).tolist() for name, bits in hooks.made.items()} == {
                "w": [version],
                "x": [version],
            }
        late = job.receiver(table(1), {}, hooks=late_hooks)
        assert late.wait_version(3, 120)
        assert {name: np.unique(bits).tolist() for name, bits in late_hooks.made.items()} == {"w": [3], "x": [3]}


def test_copies_that_no_commit_filled_are_not_given_away() -> None:
    hooks = Noted()
    with small() as job:
        job.trainer()
        donor = job.receiver(engine_table(0, ("w",), "staging"), {}, hooks=Noted(), double_buffer=True)
        job.commit(1)
        assert donor._weights.donates
        donor._weights.filled = False  # as after an update that failed: the copies are half of another version
        late = job.receiver(engine_table(1, ("w",), "staging"), {}, hooks=hooks)
        until(lambda: "pause 1" in hooks.calls, "it is asked to make room")
        until(lambda: late._aborted >= 0, "and told that there is nothing to be had")
        assert not late.serving
        assert not hooks.made
        job.commit(2)
        assert late.serving
        assert np.unique(hooks.made["w"]).tolist() == [2]


def test_padding_is_in_both_buffers() -> None:
    tensor = plain("w", (N + 2, N), "bfloat16", keep=(((N, 0), (2, N)),))
    table = EngineTable(rank=0, tensors=(tensor,), entries=(place("w", "w", (0, 0), (N, N), (0, 0)),))
    given = memory(table)
    given["w"][N:] = 77
    with small() as job:
        job.trainer()
        receiver = job.receiver(table, given, double_buffer=True)
        for version in (1, 2, 3):
            job.commit(version)
            bits = receiver.tensors["w"].view(np.uint16).reshape(N + 2, N)
            assert (bits[:N] == version).all()
            assert (bits[N:] == 77).all()


def test_only_ranks_with_the_same_tensors_made_of_the_same_boxes_give_each_other_weights() -> None:
    one = engine_table(0)
    assert _alike(one, engine_table(1))
    assert not _alike(one, engine_table(1, ("x",)))
    other = one.model_copy(update={"entries": (one.entries[0].model_copy(update={"param": "x"}),)})
    assert not _alike(one, other)
    assert not _alike(one, one.model_copy(update={"fallback": {"y": "why"}}))


# ---- somebody is slow


def test_nobody_waits_for_a_late_receiver_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "SEED_HOLDS", 0.01)
    hooks, go = Noted(), threading.Event()
    hooks.waits["pause"] = lambda: go.wait(200)
    healthy = Noted()
    with small() as job:
        job.trainer()
        first = job.receiver(0, hooks=healthy)
        job.commit(1)
        late = job.receiver(1, hooks=hooks)
        until(lambda: late._attempt >= 0, "the late one is asked to make room")
        for version in (2, 3):
            job.commit(version)
            assert first.serving
            assert values(first) == [version]
        go.set()
        assert late.wait_version(3, 120)
        assert values(late) == [3]
        job.commit(4)
        assert values(late) == values(first) == [4]


def test_a_receiver_taken_for_lost_is_called_and_gets_the_version_that_it_missed() -> None:
    with small(receivers=2) as job:
        job.trainer()
        first, second = job.receiver(0, double_buffer=True), job.receiver(1, double_buffer=True)
        job.commit(1)
        members = job.controller._members
        member, number = members.get("receiver", 1), members.number
        assert member is not None
        second._say_hello()  # nobody is lost, nothing is changed: no new plan
        until(lambda: members.get("receiver", 1) is not member, "it is heard")
        member = members.get("receiver", 1)
        assert member is not None
        assert member.here
        assert members.number == number
        members.lose(member, "so says this test")  # the controller does nothing meanwhile
        job.commit(2)
        assert values(first) == [2]
        assert second.wait_version(2, 120)
        assert values(second) == [2]
        assert members.number <= number + 2  # one without it, one with it


def test_a_receiver_that_comes_with_another_version_stops_serving_it() -> None:
    """Nobody has its tensors, so it cannot be given the right one."""
    hooks = Noted()
    with small() as job:
        job.trainer(names=("w", "x"))
        job.receiver(0)
        job.commit(1)
        job.commit(2)
        for rank, version in ((1, 1), (2, 99)):
            stale = job.receiver(engine_table(rank, ("x",)), hooks=hooks, version=version)
            until(lambda: not stale.serving, "it is told to stop")  # noqa: B023
            until(lambda: f"pause {version}" in hooks.calls, "its engine pauses")  # noqa: B023
        job.commit(3)
        assert stale.serving
        assert values(stale, "x") == [3]


def test_no_rank_serves_the_new_version_while_another_serves_the_old_one() -> None:
    calls: list[str] = []
    with small(receivers=2) as job:
        job.trainer()
        hooks = [Noted(calls, f"{rank}: ") for rank in range(2)]
        first = job.receiver(0, hooks=hooks[0], double_buffer=True)
        job.receiver(1, hooks=hooks[1], double_buffer=True)
        job.commit(1)

        def wait_for_the_other() -> None:
            until(lambda: "0: reset 2" in calls, "rank 0 has the new weights")
            first._inbox.put(Result(77, True, [], "", 0.0))  # heard when it is through with the commit
            until(lambda: "0: told 77" in calls, "rank 0 has told so")
            assert not first.serving

        hooks[1].waits["pause"] = wait_for_the_other
        job.commit(2)
    assert calls.index("1: reset 2") < calls.index("0: resume 2"), calls


def test_an_offer_of_another_version_ends_one_update_and_begins_the_next() -> None:
    with small(trainers=2) as job:
        one, other = job.trainer(0, 2), job.trainer(1, 2)
        job.receiver(0)
        job.controller.wait_ready(120)
        found: dict[str, Any] = {}
        attempt = job.controller._members.attempt

        def first() -> None:
            found["one 1"] = one.push(1, timeout=100)
            found["one 2"] = one.push(2, timeout=100)

        thread = threading.Thread(target=first)
        thread.start()
        until(lambda: job.controller._members.attempt > attempt, "version 1 is begun")
        found["other 2"] = other.push(2, timeout=100)
        thread.join()
        assert not found["one 1"].committed
        assert found["one 1"].culprits == ("trainer 1",)
        assert found["one 2"].committed, found
        assert found["other 2"].committed, found


def test_memory_is_registered_anew_when_somebody_may_still_write_to_it() -> None:
    with small() as job:
        job.trainer()
        receiver = job.receiver(0)
        job.commit(1)
        job.controller.close()
        told: queue.Queue[Any] = queue.Queue()
        receiver._tell = told.put  # type: ignore[method-assign]
        descs = []
        for number, fence in enumerate((True, True, False)):
            receiver._inbox.put(Begin(receiver._attempt + 1 + number, 2, 60.0, False, fence))
            answer = told.get(timeout=60)
            assert isinstance(answer, Ready)
            descs.append(answer.descs)
        assert descs[0] != descs[1]
        assert descs[1] == descs[2]


# ---- the controller's book, without engines


class Post:
    """Instead of a channel: keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    def send(self, addr: NetAddr, message: Message, timeout: float = 10.0) -> None:
        self.sent.append((str(addr), message))

    def to(self, addr: str) -> list[type]:
        return [type(message) for there, message in self.sent if there == addr]


class Book:
    """A trainer and two receivers, and updates that hear what is put into `inbox`."""

    def __init__(self) -> None:
        self.post, self.inbox = Post(), queue.Queue[Any]()
        self.members = Members({"trainer": 1, "receiver": 2}, Options(), self.post, lambda: None)  # type: ignore[arg-type]
        for role, rank in (("trainer", 0), ("receiver", 0), ("receiver", 1)):
            table = trainer_table(0, 1) if role == "trainer" else engine_table(rank)
            self.members._all[role, rank] = Member((role, rank), NetAddr.parse(f"local:{role}{rank}"), table, here=True)
        self.updates = Updates(self.members, self.post, self.inbox)  # type: ignore[arg-type]

    def member(self, role: str, rank: int) -> Member:
        found = self.members.get(role, rank)
        assert found is not None
        return found


def test_who_speaks_while_an_update_is_broken_off_is_not_lost() -> None:
    book = Book()
    slow = book.member("receiver", 1)
    book.members.lose(slow, "it did not say that it has stopped")
    update = book.updates.begin(5, 60.0)
    update.members = list(book.members)
    book.inbox.put(Quiet("receiver", 3, 1))  # of an earlier attempt
    for role, rank in (("trainer", 0), ("receiver", 0)):
        book.inbox.put(Quiet(role, update.number, rank))  # type: ignore[arg-type]
    begin = time.monotonic()
    book.updates.abort(update, "why not")
    assert time.monotonic() - begin < 50  # it does not wait for one that was not asked
    assert not slow.lost
    assert Abort not in book.post.to("local:receiver1")
    assert Call in book.post.to("local:receiver1")


def test_who_speaks_while_an_update_is_committed_is_not_lost_and_a_late_word_counts() -> None:
    book = Book()
    slow = book.member("receiver", 1)
    book.members.lose(slow, "slow")
    update = book.updates.begin(5, 0.0)
    update.members = [book.member("receiver", 0)]
    book.inbox.put(Quiet("receiver", 3, 1))
    reason, bad = book.updates.commit(update)
    assert not slow.lost
    assert bad == ["receiver 0"]
    assert "did not say" in reason
    book.members.resumed(Resumed(update.number, 0, ""))
    assert book.member("receiver", 0).version == 5


def test_an_offer_that_waited_too_long_stops_nobody() -> None:
    book = Book()
    offer = Offer(0, 7, 5.0, book.members.number, 0, b"", time.monotonic() - 6.0)
    report = book.updates.run(offer)
    assert not report.committed
    assert "the controller was busy" in report.reason
    assert not book.post.sent


def test_offers_that_came_while_something_else_was_under_way_are_heard() -> None:
    book = Book()
    now = time.monotonic()
    update = book.updates.begin(7, 60.0)
    update.offers[0] = Offer(0, 7, 60.0, 1, 0, b"", now)
    book.updates.later = [Offer(1, 7, 60.0, 1, 0, b"", now), Offer(2, 6, 1.0, 1, 0, b"", now - 2.0)]
    book.updates._heard_before(update)
    assert sorted(update.offers) == [0, 1]
    book.updates.later.append(Offer(2, 8, 60.0, 1, 0, b"", now))
    with pytest.raises(NotCommitted, match="trainer 2 offers version 8"):
        book.updates._heard_before(update)
    assert [event.version for event in book.updates.later if isinstance(event, Offer)] == [6, 8]


def test_a_stop_that_is_older_than_what_a_receiver_took_part_in_is_not_heard() -> None:
    with TransferEngine.open() as engine, TransferEngine.open() as ours:
        receiver = Receiver(ours, engine_table(0), memory(engine_table(0)), controller=engine.address, version=3)
        receiver._attempt = 10
        receiver._stop(Stop(9, 2, "old", False))
        assert receiver.serving
        receiver._stop(Stop(10, 3, "the same", False))
        assert receiver.serving
        receiver._stop(Stop(10, 4, "another one", False))
        assert not receiver.serving
        receiver.close()
