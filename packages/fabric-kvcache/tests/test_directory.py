"""Registrations in a store: by threads on one in memory, and by processes that are killed, on a real TCPStore."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_core import BackendError, ConfigError, StaleHandle
from fabric_kvcache.directory import Displaced, Member, StoreDirectory
from fabric_kvcache.registry import NobodyThere, Registry

LIMIT = 60.0  # seconds: the longest that anything may take which is meant to work


def names(members: list[Member]) -> list[str]:
    return [one.name for one in members]


class MemoryStore:
    """A torch store's methods over a dict. `broken`: every call fails as torch's do."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.broken = False
        self._lock = threading.Lock()

    def _enter(self) -> threading.Lock:
        if self.broken:
            raise RuntimeError("Connection reset by peer\nException raised from recvBytes")
        return self._lock

    def add(self, key: str, value: int) -> int:
        with self._enter():
            total = int(self.data.get(key, b"0")) + value
            self.data[key] = str(total).encode()
            return total

    def check(self, keys: list[str]) -> bool:
        with self._enter():
            return all(key in self.data for key in keys)

    def get(self, key: str) -> bytes:
        with self._enter():
            return self.data[key]

    def set(self, key: str, value: str) -> None:
        with self._enter():
            self.data[key] = value.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._enter():
            if key not in self.data:
                if expected:
                    return expected.encode()
                self.data[key] = desired.encode()
            elif self.data[key] == expected.encode():
                self.data[key] = desired.encode()
            return self.data[key]


# ---- the store -------------------------------------------------------------------------------------------------------


def until(what: Callable[[], bool], seconds: float = LIMIT) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


def test_a_name_changes_hands_and_the_old_owner_hears_of_it() -> None:
    directory = StoreDirectory(MemoryStore())
    with directory.register("p", "prefiller", ["local:p"], lease=0.04) as old:
        with directory.register("p", "decoder", ["local:q"], lease=0.04) as new:
            until(lambda: isinstance(old.problem, Displaced))
            assert directory.read()[0].incarnation == new.member.incarnation
            with pytest.raises(Displaced):
                old.change(role="decoder")
        assert directory.read() == []
        old.close()
        assert directory.read() == []


def test_slots_are_used_again_so_the_store_does_not_grow() -> None:
    store = MemoryStore()
    directory = StoreDirectory(store)
    for turn in range(20):
        with ExitStack() as stack:
            for n in range(3):
                stack.enter_context(directory.register(f"p{turn}-{n}", "prefiller", ["local:p"], lease=60))
            assert len(directory.read()) == 3
    assert len(store.data) == 1 + 3
    full = StoreDirectory(MemoryStore(), limit=1)
    with (
        full.register("a", "prefiller", ["local:a"], lease=60),
        pytest.raises(BackendError, match="is full: 1 records"),
    ):
        full.register("b", "prefiller", ["local:b"], lease=60)


def test_many_register_at_once_and_each_has_a_record_of_its_own() -> None:
    directory = StoreDirectory(MemoryStore())
    with ExitStack() as stack:
        made: list[Any] = []
        threads = [
            threading.Thread(
                target=lambda n=n: made.append(directory.register(f"p{n}", "prefiller", [f"local:p{n}"], lease=60))
            )
            for n in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        for registration in made:
            stack.enter_context(registration)
        assert sorted(m.name for m in directory.read()) == sorted(f"p{n}" for n in range(12))
    assert directory.read() == []


def test_a_record_that_was_swept_while_its_owner_stood_still_is_written_again() -> None:
    store = MemoryStore()
    directory = StoreDirectory(store)
    with directory.register("p", "prefiller", ["local:p"], lease=0.04):
        for _ in range(5):
            for known in directory.read():
                directory.forget(known)
            until(lambda: len(directory.read()) == 1)
    assert directory.read() == []


def test_a_store_that_breaks_is_survived() -> None:
    store = MemoryStore()
    directory = StoreDirectory(store)
    registry = Registry(directory)
    with directory.register("p", "prefiller", ["local:p"], lease=0.2) as registration:
        assert names(registry.members()) == ["p"]
        store.broken = True
        until(lambda: registration.problem is not None)
        with pytest.raises(BackendError, match=r"does not answer \(add\): Connection reset by peer$"):
            directory.read()
        until(lambda: registry.members() != [] and registry.problem is not None)
        store.broken = False
        until(lambda: registration.problem is None)
        beat = directory.read()[0].beat
        until(lambda: directory.read()[0].beat > beat)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=200))
def test_any_bytes_in_the_store_are_no_crash(text: str) -> None:
    store = MemoryStore()
    store.set("fabric-kv/slots", "1")
    store.set("fabric-kv/0", text)
    directory = StoreDirectory(store)
    assert directory.read() == []
    with directory.register("p", "prefiller", ["local:p"], lease=60):
        assert len(directory.read()) == 1


@pytest.mark.parametrize(
    ("name", "addresses", "lease"), [("", ["local:a"], 1), ("a", [], 1), ("a", ["nowhere"], 1), ("a", ["local:a"], 0)]
)
def test_a_registration_that_makes_no_sense_is_refused(name: str, addresses: list[str], lease: float) -> None:
    with pytest.raises(ConfigError):
        StoreDirectory(MemoryStore()).register(name, "prefiller", addresses, lease=lease)


# ---- processes and a real TCPStore -----------------------------------------------------------------------------------


class Instance:
    def __init__(self, port: int, name: str, role: str, lease: float) -> None:
        script = Path(__file__).parent / "registry_peer.py"
        words = [sys.executable, str(script), str(port), name, role, str(lease)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = name

    def hear(self, wanted: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == wanted

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self.hear(f"{line.split(maxsplit=1)[0]} done")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=LIMIT)


@pytest.fixture
def instances() -> Iterator[list[Instance]]:
    started: list[Instance] = []
    yield started
    for one in started:
        one.close()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_processes_come_go_change_and_are_killed(instances: list[Instance]) -> None:
    distributed = pytest.importorskip("torch.distributed")
    from datetime import timedelta

    lease = 3.0
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    registry = Registry(StoreDirectory(store), seed=3)
    for name, role in (("p0", "prefiller"), ("p1", "prefiller"), ("d0", "decoder")):
        instances.append(Instance(store.port, name, role, lease))
    for one in instances:
        one.hear("registered")
    p0, p1, d0 = instances
    until(lambda: names(registry.members()) == ["d0", "p0", "p1"])
    assert sorted(registry.choose("prefiller").member.name for _ in range(4)) == ["p0", "p0", "p1", "p1"]
    # The decoder becomes a prefiller at run time, and back.
    d0.tell("role prefiller")
    until(lambda: names(registry.members("prefiller")) == ["d0", "p0", "p1"])
    assert registry.choose("prefiller").addresses == ["local:d0"]
    d0.tell("role decoder")
    until(lambda: names(registry.members("decoder")) == ["d0"])
    # Killed: gone within a lease of the kill (this process may be late to look, the machine may be busy).
    p0.process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    p0.process.wait(LIMIT)
    longest = 0.0
    while True:
        before = time.monotonic()
        if names(registry.members("prefiller")) == ["p1"]:
            break
        time.sleep(lease / 50)
        longest = max(longest, time.monotonic() - before)
    assert time.monotonic() - killed <= lease + 2 * longest
    assert registry.choose("prefiller").member.name == "p1"
    # Stopped: the same; and it is back with its next beat, its record swept or not.
    p1.process.send_signal(signal.SIGSTOP)
    until(lambda: registry.members("prefiller") == [])
    with pytest.raises(NobodyThere, match="p1 has been silent for"):
        registry.choose("prefiller")
    p1.process.send_signal(signal.SIGCONT)
    until(lambda: names(registry.members("prefiller")) == ["p1"])
    # A new process under the dead one's name is another incarnation.
    again = Instance(store.port, "p0", "prefiller", lease)
    instances.append(again)
    again.hear("registered")
    until(lambda: names(registry.members("prefiller")) == ["p0", "p1"])
    again.tell("drain")
    until(lambda: [m.state for m in registry.members() if m.name == "p0"] == ["draining"])
    assert registry.choose("prefiller").member.name == "p1"
    p1.tell("close")
    until(lambda: names(registry.members("prefiller")) == ["p0"])


def test_a_load_that_cannot_be_told_costs_no_beat() -> None:
    """The heart goes on with the last figure, and the owner sees why."""
    answers: list[Any] = [7]

    def load() -> int:
        if answers[0] is None:
            raise RuntimeError("metrics are down")
        return int(answers[0])

    directory = StoreDirectory(MemoryStore())
    with directory.register("p", "prefiller", ["local:p"], lease=0.04, load=load) as registration:
        until(lambda: directory.read()[0].load == 7)
        answers[0] = None
        until(lambda: registration.problem is not None)
        assert "metrics are down" in str(registration.problem)
        beat = directory.read()[0].beat
        until(lambda: directory.read()[0].beat > beat + 2)
        assert directory.read()[0].load == 7
        answers[0] = 1 << 50  # more than a record holds
        until(lambda: registration.problem is None)
        assert directory.malformed == 0


def test_a_change_that_nobody_could_read_is_refused_and_so_is_one_after_the_end() -> None:
    directory = StoreDirectory(MemoryStore())
    registration = directory.register("p", "prefiller", ["local:p"], lease=60)
    with pytest.raises(ConfigError, match="'Decoder'"):
        registration.change(role="Decoder")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="state=5"):
        registration.change(state=5)  # type: ignore[arg-type]
    assert [(one.role, one.state) for one in directory.read()] == [("prefiller", "serving")]
    registration.close()
    with pytest.raises(StaleHandle, match="register it again"):
        registration.change(state="draining")
    assert directory.read() == []
