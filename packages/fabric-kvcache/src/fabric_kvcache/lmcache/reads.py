"""Reads of a peer's memory, made of writes: the peer is asked for ranges, and writes them where they are wanted.

Every object is one write with the task's immediate. When the writes of a question have ended the peer says which ended
well; a task is over when all of that was said, and so many immediates have come. Knows no LMCache.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fabric_core import BadRange, ConfigError, FabricError, MrDesc, NetAddr, Pages, Transfer, TransferEngine

__all__ = ["Ended", "Read", "Reads"]

log = logging.getLogger("fabric.kvcache.lmcache")
Range = tuple[int, int]  #: offset, bytes
_BUFFERS = 64
_SLACK = 5.0  #: seconds beyond a question's deadline until nobody is waited for any more
_LONGEST = 86400.0


class Read(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="r"):
    """Write these ranges of your memory to those of mine."""

    asker: str  #: its address
    task: int
    part: int
    desc: bytes
    imm: int
    seconds: float
    remote: list[int]
    local: list[int]
    sizes: list[int]


class Ended(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="e"):
    """All writes of a question have ended; nothing of it will be written any more."""

    task: int
    part: int
    good: list[bool]


@dataclass(slots=True)
class _Task:
    peer: NetAddr
    imm: int
    good: list[bool]
    deadline: float
    parts: dict[int, range] = field(default_factory=dict)  # those of which the end is not known, and their objects
    lost: bool = False


class Reads:
    """One engine's questions and answers over one region of memory.

    Args:
        memory: (address, bytes), readable by every peer that reaches the engine, and written to by those that were
            asked. timeout: seconds of a task.
    """

    def __init__(self, engine: TransferEngine, memory: tuple[int, int], *, timeout: float = 30.0) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST:
            raise ConfigError(f"timeout={timeout!r}: seconds, above 0 and at most {_LONGEST:g}")
        self.engine, self.timeout, self.nbytes = engine, float(timeout), memory[1]
        self._handle, desc = engine.reg_mr(memory)
        self._desc = desc.to_bytes()
        size = min(engine.max_message, 1 << 16)
        self._most = (size - len(self._desc) - 512) // 32  # objects of one message
        if self._most < 1:
            raise ConfigError(f"messages of {size} bytes are too short to ask for anything")
        self._lock = threading.Lock()
        self._tasks: dict[int, _Task] = {}
        self._pool = engine.submit_recvs(size, _BUFFERS, self._on_word)
        engine.on_peer_lost = self._on_lost

    def submit(self, peer: NetAddr, local: Sequence[Range], remote: Sequence[Range]) -> int:
        """Ask a peer to write ranges of its memory to ranges of ours; return the task's number.

        Raises BadRange: different numbers of ranges, sizes that differ, or ours are outside of our memory.
        """
        self._check(local, remote)
        imm = self.engine.alloc_imm()
        task = _Task(peer, imm, [False] * len(local), time.monotonic() + self.timeout)
        task.parts = {
            number: range(first, min(first + self._most, len(local)))
            for number, first in enumerate(range(0, len(local), self._most))
        }
        number = secrets.randbits(62)  # whoever cannot guess it cannot end the task
        with self._lock:
            self._tasks[number] = task
        for part, objects in list(task.parts.items()):
            word = Read(
                str(self.engine.address), number, part, self._desc, imm, self.timeout,
                [remote[i][0] for i in objects], [local[i][0] for i in objects], [local[i][1] for i in objects],
            )  # fmt: skip
            self._say(peer, word, lambda number=number, part=part: self._not_asked(number, part))
        return number

    def status(self, number: int) -> list[bool] | None:
        """Return which objects came, once it is known, and forget the task; None before. Raises KeyError."""
        with self._lock:
            if number not in self._tasks:
                raise KeyError(f"no read has the number {number}, or its end was told already")
            task = self._tasks[number]
            late = task.lost or time.monotonic() > task.deadline + _SLACK
            if task.parts and not late:
                return None
            if self.engine.imm_count(task.imm) < sum(task.good):
                if not late:
                    return None
                task.good = [False] * len(task.good)
            del self._tasks[number]
        self.engine.free_imm(task.imm)
        return task.good

    def forget(self, peer: NetAddr) -> None:
        """Drop all tasks of a peer."""
        with self._lock:
            gone = [number for number, task in self._tasks.items() if task.peer == peer]
            tasks = [self._tasks.pop(number) for number in gone]
        for task in tasks:
            self.engine.free_imm(task.imm)

    def close(self) -> None:
        """Answer and ask no more. The engine stays open."""
        self._pool.close()
        with self._lock:
            peers = {task.peer for task in self._tasks.values()}
        for peer in peers:
            self.forget(peer)
        self._handle.close()

    # ---- asking

    def _check(self, local: Sequence[Range], remote: Sequence[Range]) -> None:
        if len(local) != len(remote):
            raise BadRange(f"{len(local)} ranges here, {len(remote)} at the peer: give as many")
        for (at, size), (there, nbytes) in zip(local, remote, strict=True):
            if size != nbytes:
                raise BadRange(f"{nbytes} bytes at {there} of the peer are to go to {size} bytes at {at}")
            if at < 0 or size < 1 or at + size > self.nbytes or there < 0:
                raise BadRange(f"{size} bytes at {at}, from {there} of the peer: our memory has {self.nbytes} bytes")

    def _not_asked(self, number: int, part: int) -> None:
        with self._lock:
            if (task := self._tasks.get(number)) is not None:
                task.parts.pop(part, None)

    def _on_lost(self, error: Any) -> None:
        lost = str(getattr(error, "peer", "")).partition("#")[0]
        with self._lock:
            for task in self._tasks.values():
                task.lost = task.lost or str(task.peer).partition("#")[0] == lost

    # ---- hearing

    def _on_word(self, data: bytes) -> None:
        try:
            word = msgspec.msgpack.decode(data, type=Read | Ended)
            if isinstance(word, Read):
                self._answer(word)
                return
        except (msgspec.DecodeError, FabricError) as error:
            log.warning("a message was thrown away: %s", error)
            return
        with self._lock:
            task = self._tasks.get(word.task)
            objects = None if task is None else task.parts.pop(word.part, None)
            if task is not None and objects is not None and len(objects) == len(word.good):
                task.good[objects.start : objects.stop] = word.good

    def _answer(self, read: Read) -> None:
        """Write what is asked for. What the message says is checked: whoever reaches the engine may have sent it."""
        asker, desc = NetAddr.parse(read.asker), MrDesc.from_bytes(read.desc)
        ranges = list(zip(read.remote, read.local, read.sizes, strict=False))
        fits = len(read.remote) == len(read.local) == len(ranges) == len(read.sizes) and 0 < read.seconds <= _LONGEST
        if not fits or any(min(a, b) < 0 or n < 1 or a + n > self.nbytes for a, b, n in ranges):
            log.warning("%s asks for what is not in %d bytes of memory", asker, self.nbytes)
            self._say(asker, Ended(read.task, read.part, [False] * len(read.sizes)))
            return
        _Answer(self, read, asker, desc, ranges).start(self._handle)

    def _say(self, peer: NetAddr, word: Read | Ended, failed: Any = None) -> None:
        def on_done(transfer: Transfer) -> None:
            if failed is not None and transfer.state != "done":
                failed()

        try:
            self.engine.submit_send(peer, msgspec.msgpack.encode(word), on_done, timeout=self.timeout)
        except FabricError as error:
            log.warning("%s: %s", peer, error)
            if failed is not None:
                failed()


class _Answer:
    """The writes of one question: one operation for all objects of one size."""

    def __init__(
        self, reads: Reads, read: Read, asker: NetAddr, desc: MrDesc, ranges: list[tuple[int, int, int]]
    ) -> None:
        self._reads, self._read, self._asker, self._desc, self._ranges = reads, read, asker, desc, ranges
        self._good = [False] * len(ranges)
        self._left = 1
        self._lock = threading.Lock()

    def start(self, handle: Any) -> None:
        groups: dict[int, list[int]] = {}
        for i, (_, _, size) in enumerate(self._ranges):
            groups.setdefault(size, []).append(i)
        for size, members in groups.items():
            with self._lock:
                self._left += 1
            try:
                self._post(handle, size, members)
            except (FabricError, OverflowError) as error:
                log.warning("%s: %s", self._asker, error)
                self._over(members, False)
        self._over([], True)

    def _post(self, handle: Any, size: int, members: list[int]) -> None:
        remote = [self._ranges[i][0] for i in members]
        local = [self._ranges[i][1] for i in members]
        unit = math.gcd(*remote, *local) or 1
        source, target = Pages([at // unit for at in remote], unit), Pages([at // unit for at in local], unit)

        def on_done(transfer: Transfer) -> None:
            self._over(members, transfer.state == "done")

        self._reads.engine.submit_paged_writes(
            size, self._read.imm, (handle, source), (self._desc, target), on_done, timeout=self._read.seconds
        )

    def _over(self, members: list[int], good: bool) -> None:
        with self._lock:
            for i in members:
                self._good[i] = good
            self._left -= 1
            last = not self._left
        if last:
            self._reads._say(self._asker, Ended(self._read.task, self._read.part, self._good))
