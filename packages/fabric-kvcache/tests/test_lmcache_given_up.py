"""Reads that end before their peer does: whoever is not waited for any more has no right to write any more."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from fabric_core import MrDesc, PeerLost, RemoteAccessError, TransferEngine
from fabric_kvcache.lmcache.answers import Ended, Read
from fabric_kvcache.lmcache.reads import Reads

SIZE = 1 << 12
LIMIT = 60.0  # seconds: the longest that anything may take which is meant to work


class Slow:
    """A peer that hears questions, and writes when the test says so."""

    def __init__(self) -> None:
        self.engine = TransferEngine.open()
        self.memory = np.full(SIZE, 7, np.uint8)
        self.handle, _ = self.engine.reg_mr(self.memory)
        self.words: queue.Queue[bytes] = queue.Queue()
        self.engine.submit_recvs(1 << 16, 8, self.words.put)

    def question(self) -> Read:
        return msgspec.msgpack.decode(self.words.get(timeout=LIMIT), type=Read)

    def write(self, read: Read, timeout: float = LIMIT) -> None:
        """Answer a question's first range."""
        desc = MrDesc.from_bytes(read.desc)
        self.engine.submit_single_write(
            read.sizes[0], read.imm, (self.handle, read.remote[0]), (desc, read.local[0]), timeout=timeout
        ).wait(timeout)


@pytest.fixture
def slow() -> Iterator[Slow]:
    peer = Slow()
    yield peer
    peer.engine.close()


@pytest.fixture
def us() -> Iterator[tuple[Reads, np.ndarray]]:  # type: ignore[type-arg]
    memory = np.zeros(SIZE, np.uint8)
    engine = TransferEngine.open(imm_slots=256)
    yield Reads(engine, (memory.ctypes.data, SIZE), timeout=LIMIT), memory
    engine.close()


def ended(reads: Reads, number: int) -> list[bool]:
    end = time.monotonic() + LIMIT
    while (good := reads.status(number)) is None:
        assert time.monotonic() < end, "a read has no end"
        time.sleep(0)
    return good


def by_its_deadline(reads: Reads, slow: Slow, number: int) -> None:
    reads._tasks[number].deadline = -1.0
    assert ended(reads, number) == [False]


def by_the_peers_loss(reads: Reads, slow: Slow, number: int) -> None:
    reads._tasks[number].right._lost(PeerLost("it stands still", peer=str(slow.engine.address)))
    assert ended(reads, number) == [False]


def by_another_read_of_the_peer(reads: Reads, slow: Slow, number: int) -> None:
    other = reads.submit(slow.engine.address, [(8, 8)], [(8, 8)])
    by_its_deadline(reads, slow, other)
    assert ended(reads, number) == [False]


def by_a_client_that_closes(reads: Reads, slow: Slow, number: int) -> None:
    reads.forget(slow.engine.address)


def by_nobody_who_asks(reads: Reads, slow: Slow, number: int) -> None:
    """LMCache gives a read up without a word; the next one finds it."""
    reads._tasks[number].deadline = -10.0  # the machine's clock may have begun just now
    reads.submit(slow.engine.address, [(8, 8)], [(8, 8)])
    assert number not in reads._tasks


@pytest.mark.parametrize(
    "end",
    [by_its_deadline, by_the_peers_loss, by_another_read_of_the_peer, by_a_client_that_closes, by_nobody_who_asks],
)
def test_nothing_is_written_after_the_end(
    us: tuple[Reads, np.ndarray],  # type: ignore[type-arg]
    slow: Slow,
    end: Callable[[Reads, Slow, int], None],
) -> None:
    reads, memory = us
    number = reads.submit(slow.engine.address, [(0, 8)], [(0, 8)])
    read = slow.question()
    end(reads, slow, number)
    with pytest.raises(RemoteAccessError):
        slow.write(read)
    assert not memory.any()


def test_what_ended_well_takes_no_right_along(us: tuple[Reads, np.ndarray], slow: Slow) -> None:  # type: ignore[type-arg]
    """Reads that end as they should leave others of the peer alone."""
    reads, memory = us
    first, second = (reads.submit(slow.engine.address, [(at, 8)], [(at, 8)]) for at in (0, 16))
    one, two = slow.question(), slow.question()
    for number, read in ((first, one), (second, two)):
        slow.write(read)
        reads._on_word(msgspec.msgpack.encode(Ended(read.task, 0, [True])))
        assert ended(reads, number) == [True]
    assert one.desc == two.desc
    assert memory.nonzero()[0].tolist() == [*range(8), *range(16, 24)]


def test_a_peer_may_write_again_when_it_is_asked_again(us: tuple[Reads, np.ndarray], slow: Slow) -> None:  # type: ignore[type-arg]
    reads, memory = us
    by_its_deadline(reads, slow, reads.submit(slow.engine.address, [(0, 8)], [(0, 8)]))
    slow.question()
    number = reads.submit(slow.engine.address, [(8, 8)], [(8, 8)])
    slow.write(slow.question())
    reads._on_word(msgspec.msgpack.encode(Ended(number, 0, [True])))
    assert ended(reads, number) == [True]
    assert memory.nonzero()[0].tolist() == list(range(8, 16))


def test_half_an_answer_is_none(us: tuple[Reads, np.ndarray], slow: Slow) -> None:  # type: ignore[type-arg]
    """Its last part is not known: an immediate of that one may stand for another object's."""
    reads, _ = us
    count = reads._most + 1
    number = reads.submit(slow.engine.address, [(0, 1)] * count, [(0, 1)] * count)
    slow.question()
    slow.write(slow.question())  # of the second part, which never says so
    reads._on_word(msgspec.msgpack.encode(Ended(number, 0, [True] + [False] * (reads._most - 1))))
    reads._tasks[number].deadline = -1.0
    assert ended(reads, number) == [False] * count


def test_many_reads_leave_nothing_behind(us: tuple[Reads, np.ndarray], slow: Slow) -> None:  # type: ignore[type-arg]
    reads, _ = us
    for _ in range(300):
        by_its_deadline(reads, slow, reads.submit(slow.engine.address, [(0, 8)], [(0, 8)]))
    assert not reads._tasks  # and 300 reads did not need more than 256 immediates
    assert not reads.rights._rights
