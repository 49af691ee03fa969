"""Writes to raw addresses: every block where it belongs, nothing beside it, and a number when it did not work."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from fabric_core import BadRange, ConfigError, PeerLost, TransferEngine
from fabric_kvcache.sglang.regions import Regions, Where
from fabric_kvcache.sglang.sessions import Sessions

LIMIT = 60.0  # seconds: the longest that anything may take which is meant to work
SIZES = (40000, 8192, 12345)


class Side:
    """An engine and three registered regions of random bytes."""

    def __init__(self, salt: int, timeout: float = LIMIT) -> None:
        self.sessions = Sessions(TransferEngine.open(local_shuffle=salt), timeout=timeout)
        dice = np.random.default_rng(salt)
        self.memory = [dice.integers(0, 256, size, np.uint8) for size in SIZES]
        assert self.sessions.batch_register([m.ctypes.data for m in self.memory], list(SIZES)) == 0

    @property
    def name(self) -> str:
        return self.sessions.get_session_id()

    def at(self, region: int, offset: int) -> int:
        return int(self.memory[region].ctypes.data) + offset


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    found = Side(3), Side(4)
    yield found
    for side in found:
        side.sessions.close()


Block = tuple[tuple[int, int], tuple[int, int], int]


def write(us: Side, peer: Side, blocks: list[Block]) -> int:
    return us.sessions.batch_transfer_sync(
        peer.name, [us.at(*a) for a, _, _ in blocks], [peer.at(*b) for _, b, _ in blocks], [n for _, _, n in blocks]
    )


def test_blocks_of_many_lengths_between_many_regions(sides: tuple[Side, Side]) -> None:
    us, peer = sides
    dice = np.random.default_rng(1)
    lengths = dice.choice([1, 7, 512, 512, 512, 1000], 60).tolist()
    blocks: list[Block] = []
    places = [0, 0, 0]
    for number, n in enumerate(lengths):
        there = number % 3
        if places[there] + n > SIZES[there]:
            continue
        here = int(dice.integers(0, 3))
        blocks.append(((here, int(dice.integers(0, SIZES[here] - n))), (there, places[there]), n))
        places[there] += n + 3  # some bytes between, which must stay
    wanted, ours = [m.copy() for m in peer.memory], [m.copy() for m in us.memory]
    for (a, i), (b, j), n in blocks:
        wanted[b][j : j + n] = us.memory[a][i : i + n]
    assert write(us, peer, blocks) == 0
    assert all(np.array_equal(x, y) for x, y in zip(peer.memory, wanted, strict=True))
    assert all(np.array_equal(x, y) for x, y in zip(us.memory, ours, strict=True))


def test_threads_write_at_once(sides: tuple[Side, Side]) -> None:
    us, peer = sides
    pages: list[list[Block]] = [[((0, 64 * i), (0, 64 * (599 - i)), 64)] for i in range(600)]
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda blocks: write(us, peer, blocks), pages, timeout=LIMIT)) == {0}
    assert np.array_equal(peer.memory[0][:38400].reshape(-1, 64), us.memory[0][:38400].reshape(-1, 64)[::-1])


def test_nothing_to_write(sides: tuple[Side, Side]) -> None:
    us, peer = sides
    assert us.sessions.batch_transfer_sync(peer.name, [], [], []) == 0
    assert write(us, peer, [((0, 0), (0, 0), 0)]) == 0


def test_what_is_not_registered_is_not_written(sides: tuple[Side, Side]) -> None:
    us, peer = sides
    good: Block = ((0, 0), (0, 0), 64)
    for bad, whose in ((((1, SIZES[1] - 8), (0, 64), 9), "our memory"), (((0, 0), (1, SIZES[1] - 8), 9), "memory of")):
        before = [m.copy() for m in peer.memory]
        blocks: list[Block] = [good, bad]
        assert write(us, peer, blocks) == -1
        with pytest.raises(BadRange, match=f"9 bytes at 0x.* registered {whose}.*1 of 2 blocks"):
            us.sessions.write(
                peer.name, [us.at(*a) for a, _, _ in blocks], [peer.at(*b) for _, b, _ in blocks], [64, 9]
            )
        assert all(np.array_equal(x, y) for x, y in zip(peer.memory, before, strict=True))


def test_memory_that_was_registered_later_is_found(sides: tuple[Side, Side]) -> None:
    us, peer = sides
    assert write(us, peer, [((0, 0), (0, 0), 8)]) == 0  # its regions are known now
    late = np.zeros(100, np.uint8)
    assert us.sessions.transfer_sync(peer.name, us.at(0, 0), int(late.ctypes.data), 100) == -1
    peer.sessions.batch_register([late.ctypes.data], [100])
    assert us.sessions.transfer_sync(peer.name, us.at(0, 0), int(late.ctypes.data), 100) == 0
    assert np.array_equal(late, us.memory[0][:100])
    peer.sessions.batch_deregister([late.ctypes.data, 12345])
    assert us.sessions.transfer_sync(peer.name, us.at(0, 50), int(late.ctypes.data), 50) == -1
    assert np.array_equal(late, us.memory[0][:100])


def test_regions_that_overlap_and_grow(sides: tuple[Side, Side]) -> None:
    us, peer = sides
    whole = np.zeros(4096, np.uint8)
    at = int(whole.ctypes.data)
    peer.sessions.batch_register([at, at + 1024, at], [2048, 16, 2048])
    assert us.sessions.transfer_sync(peer.name, us.at(0, 0), at + 1030, 1000) == 0  # beside the small one inside
    assert us.sessions.transfer_sync(peer.name, us.at(0, 0), at + 2000, 2096) == -1
    peer.sessions.batch_register([at], [4096])
    assert us.sessions.transfer_sync(peer.name, us.at(0, 0), at + 2030, 2066) == 0
    assert np.array_equal(whole[1030:2030], us.memory[0][:1000])
    peer.sessions.batch_deregister([at])
    peer.sessions.batch_register([at], [4096])  # the same memory, but what peers know of it is void
    assert us.sessions.transfer_sync(peer.name, us.at(0, 0), at, 8) == 0
    assert np.array_equal(whole[:8], us.memory[0][:8])
    assert np.array_equal(whole[2030:], us.memory[0][:2066])


def test_a_peer_that_is_gone(sides: tuple[Side, Side]) -> None:
    us, peer = sides
    name = peer.name
    assert us.sessions.send_probe(name) == 0
    peer.sessions.close()
    assert us.sessions.transfer_sync(name, us.at(0, 0), peer.at(0, 0), 8) == -1
    assert us.sessions.send_probe(name) == -1
    with pytest.raises(PeerLost):
        us.sessions.write(name, [us.at(0, 0)], [peer.at(0, 0)], [8])


def test_names_that_are_none(sides: tuple[Side, Side]) -> None:
    us, _ = sides
    assert us.sessions.send_probe("10.0.0.1:12345") == -1
    assert us.sessions.transfer_sync("nobody", us.at(0, 0), 8, 8) == -1


def test_more_regions_than_one_message_holds(sides: tuple[Side, Side]) -> None:
    us, peer = sides
    many = np.zeros((1500, 16), np.uint8)
    at = [int(row.ctypes.data) for row in many]
    peer.sessions.batch_register(at, [16] * len(at))
    assert us.sessions.batch_transfer_sync(peer.name, [us.at(0, 16 * i) for i in range(1500)], at, [16] * 1500) == 0
    assert np.array_equal(many.reshape(-1), us.memory[0][: 16 * 1500])


@pytest.mark.parametrize(
    "words",
    [b"\xff\x00rubbish", msgspec.msgpack.encode(Where("nobody", 1)), msgspec.msgpack.encode(Regions(99, 0, 1, [b"x"]))],
)
def test_words_of_a_stranger_do_no_harm(sides: tuple[Side, Side], words: bytes) -> None:
    us, peer = sides
    us.sessions.engine.submit_send(peer.sessions.engine.address, words).wait(LIMIT)
    assert write(us, peer, [((0, 0), (0, 0), 8)]) == 0


@pytest.mark.parametrize("timeout", [0, True, float("nan"), 1e9])
def test_times_that_make_no_sense(timeout: Any) -> None:
    with TransferEngine.open() as engine, pytest.raises(ConfigError, match="timeout"):
        Sessions(engine, timeout=timeout)
