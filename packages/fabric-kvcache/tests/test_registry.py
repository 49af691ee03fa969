"""Who is taken for alive, and who is chosen: by a clock of the test's own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_core import BackendError, ConfigError
from fabric_kvcache.directory import Member, StaticDirectory
from fabric_kvcache.registry import NobodyThere, Registry


class Moment:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Records:
    """A directory whose records the test writes."""

    def __init__(self, *members: Member) -> None:
        self.members = {member.name: member for member in members}
        self.broken = False
        self.forgotten: list[str] = []

    def read(self) -> list[Member]:
        if self.broken:
            raise BackendError("no store")
        return list(self.members.values())

    def forget(self, member: Member) -> None:
        self.forgotten.append(member.name)

    def beat(self, name: str, **changes: Any) -> None:
        old = self.members[name]
        self.members[name] = msgspec.structs.replace(old, beat=old.beat + 1, **changes)


def member(name: str, role: Any = "prefiller", beat: int = 0, **more: Any) -> Member:
    return Member(name=name, role=role, addresses=(f"local:{name}",), beat=beat, lease_ms=1000, **more)


def names(members: list[Member]) -> list[str]:
    return [one.name for one in members]


# ---- the view, by a clock of our own ---------------------------------------------------------------------------------


def test_who_is_silent_is_dead_within_its_lease_and_comes_back_with_its_next_beat() -> None:
    clock, records = Moment(), Records(member("a"), member("b"))
    registry = Registry(records, clock=clock)
    died = clock.now  # b's last beat
    while names(registry.members()) == ["a", "b"]:
        assert clock.now - died <= 1.0, "still there after a lease"
        clock.now += 0.125
        records.beat("a")
    assert names(registry.members()) == ["a"]
    assert clock.now - died >= 0.75, "a beat late is not dead"
    records.beat("b")
    clock.now += 0.25
    records.beat("a")
    assert names(registry.members()) == ["a", "b"]


def test_dead_records_are_swept_and_closed_ones_go_at_once() -> None:
    clock, records = Moment(), Records(member("a"), member("b"))
    registry = Registry(records, clock=clock)
    registry.members()
    for _ in range(20):
        clock.now += 0.25
        records.beat("a")
        registry.members()
    assert set(records.forgotten) == {"b"}
    del records.members["a"]
    clock.now += 0.25
    assert registry.members() == []


def test_nobody_is_dead_because_the_directory_cannot_be_read() -> None:
    clock, records = Moment(), Records(member("a"), member("b"))
    registry = Registry(records, clock=clock)
    for _ in range(4):  # b dies while we can see
        clock.now += 0.25
        records.beat("a")
        registry.members()
    records.broken = True
    for _ in range(50):
        clock.now += 0.5
        assert names(registry.members()) == ["a"]
    assert "no store" in str(registry.problem)
    records.broken = False
    clock.now += 10
    assert names(registry.members()) == ["a"]  # its heart could not write either
    clock.now += 0.8
    assert registry.members() == []  # and now it is
    with pytest.raises(NobodyThere, match=r"a has been silent for 0\.8 s; b has been silent"):
        registry.choose("prefiller")


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 60), st.integers(0, 5))
def test_requests_go_evenly_and_the_seed_decides_among_equals(count: int, requests: int, seed: int) -> None:
    def chosen() -> list[str]:
        registry = Registry(StaticDirectory([member(f"p{n}", beat=-1) for n in range(count)]), seed=seed)
        return [registry.choose("prefiller").member.name for _ in range(requests)]

    first = chosen()
    assert first == chosen()
    shares = Counter(first)
    assert max(shares.values(), default=0) - min((shares[f"p{n}"] for n in range(count)), default=0) <= 1


def test_seeds_choose_differently() -> None:
    def first(seed: int) -> str:
        return (
            Registry(StaticDirectory([member(f"p{n}", beat=-1) for n in range(8)]), seed=seed)
            .choose("prefiller")
            .member.name
        )

    assert len({first(seed) for seed in range(20)}) > 3


def test_an_ended_request_counts_no_more_and_the_members_own_account_counts_too() -> None:
    clock, records = Moment(), Records(member("a"), member("b", load=3))
    registry = Registry(records, clock=clock, seed=1)
    taken = [registry.choose("prefiller") for _ in range(3)]
    assert [choice.member.name for choice in taken] == ["a", "a", "a"]
    assert registry.outstanding("a") == 3
    with taken[0]:
        pass
    taken[0].done()  # twice counts once
    assert registry.outstanding("a") == 2
    records.beat("b", load=0)
    clock.now += 0.25
    assert registry.choose("prefiller").member.name == "b"


def test_a_member_that_failed_is_avoided_until_it_shows_that_it_lives() -> None:
    clock, records = Moment(), Records(member("a"), member("b", load=1))
    registry = Registry(records, clock=clock)
    registry.choose("prefiller").failed()
    assert registry.outstanding("a") == 0
    assert registry.choose("prefiller").member.name == "b"
    with pytest.raises(NobodyThere, match="a has failed; b was tried"):
        registry.choose("prefiller", avoid=["b"])
    records.beat("a")
    assert registry.choose("prefiller", avoid=["b"]).member.name == "a"
    static = Registry(StaticDirectory([member("s", beat=-1)]), clock=clock, hold=5.0)
    static.choose("prefiller").failed()
    with pytest.raises(NobodyThere):
        static.choose("prefiller")
    clock.now += 5.0
    assert static.choose("prefiller").member.name == "s"


def test_roles_layouts_and_draining() -> None:
    clock = Moment()
    records = Records(member("a", layout="x"), member("b", layout="y", state="draining"), member("d", "decoder"))
    registry = Registry(records, clock=clock)
    assert names(registry.members("decoder")) == ["d"]
    assert names(registry.members()) == ["a", "b", "d"]
    assert registry.choose("prefiller").member.name == "a"
    with pytest.raises(NobodyThere, match="a has layout 'x', not 'y'; b is draining"):
        registry.choose("prefiller", layout="y")
    records.beat("a", role="decoder")
    clock.now += 0.25
    assert names(registry.members("decoder")) == ["a", "d"]
    with pytest.raises(NobodyThere, match="no prefiller to choose: b is draining"):
        registry.choose("prefiller")


@pytest.mark.parametrize("text", ["local:x", "trainer=local:x", "prefiller=", "prefiller=local:a+b"])
def test_a_list_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="prefiller="):
        StaticDirectory.parse(text)


def test_a_list() -> None:
    found = StaticDirectory.parse("prefiller=local:a+local:b decoder=local:c prefiller=local:d").read()
    assert [(m.name, m.addresses) for m in found] == [
        ("prefiller0", ("local:a", "local:b")),
        ("decoder0", ("local:c",)),
        ("prefiller1", ("local:d",)),
    ]
    with pytest.raises(ConfigError, match="name of its own"):
        StaticDirectory([member("a"), member("a")])
