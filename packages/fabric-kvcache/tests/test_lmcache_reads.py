"""Reads that are made of writes: every byte, whose fault it is, and nothing outside of what was asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from fabric_core import BadRange, ConfigError, NetAddr, TransferEngine
from fabric_kvcache.lmcache.answers import Ended, Read
from fabric_kvcache.lmcache.reads import Reads

SIZE = 1 << 20
LIMIT = 60.0  # seconds: the longest that anything may take which is meant to work


class Side:
    """An engine with memory of random bytes."""

    def __init__(self, salt: int, timeout: float = LIMIT) -> None:
        self.engine = TransferEngine.open(local_shuffle=salt)
        self.bytes = np.random.default_rng(salt).integers(0, 256, SIZE, np.uint8)
        self.reads = Reads(self.engine, (self.bytes.ctypes.data, SIZE), timeout=timeout)

    @property
    def address(self) -> NetAddr:
        return self.engine.address

    def close(self) -> None:
        if not self.engine.closed:
            self.reads.close()
            self.engine.close()


@contextmanager
def two(timeout: float = LIMIT) -> Iterator[tuple[Side, Side]]:
    sides = Side(1, timeout), Side(2, timeout)
    try:
        yield sides
    finally:
        for side in sides:
            side.close()


def ended(reads: Reads, number: int) -> list[bool]:
    end = time.monotonic() + LIMIT
    while (good := reads.status(number)) is None:
        assert time.monotonic() < end, "a read has no end"
        time.sleep(0)
    return good


def test_objects_of_many_sizes_come_and_nothing_else_changes() -> None:
    with two() as (us, peer):
        sizes = [1, 4096, 4096, 70001, 7, 4096]
        local = [(sum(sizes[:i]) + 64 * i, size) for i, size in enumerate(sizes)]
        remote = [(SIZE - 1 - sum(sizes[: i + 1]) - 3 * i, size) for i, size in enumerate(sizes)]
        wanted = us.bytes.copy()
        for (at, size), (there, _) in zip(local, remote, strict=True):
            wanted[at : at + size] = peer.bytes[there : there + size]
        before = peer.bytes.copy()
        assert ended(us.reads, us.reads.submit(peer.address, local, remote)) == [True] * len(sizes)
        assert np.array_equal(us.bytes, wanted)
        assert np.array_equal(peer.bytes, before)


def test_more_objects_than_one_message_holds() -> None:
    with two() as (us, peer):
        count = 3 * us.reads._most + 5
        local = [(3 * i, 3) for i in range(count)]
        remote = [(3 * (count - 1 - i), 3) for i in range(count)]
        assert ended(us.reads, us.reads.submit(peer.address, local, remote)) == [True] * count
        assert np.array_equal(us.bytes[: 3 * count].reshape(-1, 3), peer.bytes[: 3 * count].reshape(-1, 3)[::-1])


def test_both_directions_at_once() -> None:
    with two() as (us, peer):
        half = SIZE // 2
        ours, theirs = us.bytes[:half].copy(), peer.bytes[:half].copy()
        tasks = [
            (side.reads, side.reads.submit(other.address, [(half, half)], [(0, half)]))
            for side, other in ((us, peer), (peer, us))
        ]
        assert [ended(reads, number) for reads, number in tasks] == [[True], [True]]
        assert np.array_equal(us.bytes[half:], theirs)
        assert np.array_equal(peer.bytes[half:], ours)


def test_the_peer_refuses_what_it_has_not() -> None:
    with two() as (us, peer):
        before = us.bytes.copy()
        assert ended(us.reads, us.reads.submit(peer.address, [(0, 10)], [(SIZE - 9, 10)])) == [False]
        assert np.array_equal(us.bytes, before)


def test_a_peer_that_is_gone_ends_it() -> None:
    with two() as (us, peer):
        assert ended(us.reads, us.reads.submit(peer.address, [(0, 8)], [(0, 8)])) == [True]
        peer.close()
        assert ended(us.reads, us.reads.submit(peer.address, [(0, 8)], [(0, 8)])) == [False]


def test_a_peer_that_dies_with_the_question_ends_it() -> None:
    with two() as (us, _), TransferEngine.open() as deaf:
        heard = threading.Event()
        deaf.submit_recvs(1 << 16, 4, lambda _: heard.set())
        number = us.reads.submit(deaf.address, [(0, 8)], [(0, 8)])
        assert heard.wait(LIMIT)
        assert us.reads.status(number) is None
        deaf.close()
        assert ended(us.reads, number) == [False]


def test_words_are_not_enough_without_the_writes() -> None:
    """A word may overtake the writes that it speaks of (C2)."""
    with two() as (us, _), TransferEngine.open() as deaf:
        deaf.submit_recvs(1 << 16, 4, lambda _: None)
        number = us.reads.submit(deaf.address, [(0, 8)], [(0, 8)])
        us.reads._on_word(msgspec.msgpack.encode(Ended(number, 0, [True])))
        assert us.reads.status(number) is None


def test_what_is_refused_before_anything_is_sent() -> None:
    with two() as (us, peer):
        for local, remote, text in (
            ([(0, 8)], [(0, 9)], "9 bytes at 0 of the peer"),
            ([(0, 8)], [], "1 ranges here, 0 at the peer"),
            ([(SIZE - 1, 2)], [(0, 2)], f"our memory has {SIZE} bytes"),
            ([(0, 0)], [(0, 0)], "0 bytes"),
            ([(-1, 2)], [(0, 2)], "-1"),
        ):
            with pytest.raises(BadRange, match=text):
                us.reads.submit(peer.address, local, remote)
        with pytest.raises(KeyError, match="no read has the number 77"):
            us.reads.status(77)


@pytest.mark.parametrize("timeout", [0, True, float("nan"), 1e9])
def test_times_that_make_no_sense(timeout: Any) -> None:
    with TransferEngine.open() as engine, pytest.raises(ConfigError, match="timeout"):
        Reads(engine, (np.zeros(8, np.uint8).ctypes.data, 8), timeout=timeout)


@pytest.mark.parametrize(
    "change",
    [{"remote": [1 << 60]}, {"remote": [-1]}, {"sizes": [0]}, {"local": []}, {"seconds": -1.0}, {"asker": "nobody"},
     {"desc": b"rubbish"}],
)  # fmt: skip
def test_questions_of_a_stranger_do_no_harm(change: dict[str, Any]) -> None:
    with two() as (us, peer):
        word = Read(str(us.address), 0, 0, us.reads.rights.of(peer.address).desc, 5, 1.0, [0], [0], [8])
        before = us.bytes.copy()
        us.engine.submit_send(peer.address, msgspec.msgpack.encode(msgspec.structs.replace(word, **change))).wait(LIMIT)
        us.engine.submit_send(peer.address, b"\xff\x00rubbish").wait(LIMIT)
        assert ended(us.reads, us.reads.submit(peer.address, [(64, 8)], [(64, 8)])) == [True]  # it still answers
        before[64:72] = peer.bytes[64:72]
        assert np.array_equal(us.bytes, before)


def test_tasks_of_a_forgotten_peer_are_gone() -> None:
    with two() as (us, peer):
        number = us.reads.submit(peer.address, [(0, 8)], [(0, 8)])
        us.reads.forget(peer.address)
        with pytest.raises(KeyError):
            us.reads.status(number)
