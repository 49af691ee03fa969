"""Reads of a peer's memory, made of writes: the peer is asked for ranges, and writes them where they are wanted.

Every object is one write with the task's immediate. When the writes of a question have ended the peer says which ended
well; a task is over when all of that was said, and so many immediates have come. A task that ends in another way takes
the peer's right to write along: what LMCache uses again, nobody writes to. Knows no LMCache.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fabric_core import BadRange, ConfigError, FabricError, NetAddr, Transfer, TransferEngine
from fabric_kvcache.lmcache.answers import LONGEST, Answer, Ended, Read
from fabric_kvcache.lmcache.rights import Right, Rights

__all__ = ["Reads"]

log = logging.getLogger("fabric.kvcache.lmcache")
Range = tuple[int, int]  #: offset, bytes
_BUFFERS = 64
_FORGOTTEN = 5.0  #: seconds beyond its deadline after which nobody is expected to ask for a task any more


@dataclass(slots=True)
class _Task:
    right: Right
    imm: int
    good: list[bool]
    deadline: float
    parts: dict[int, range] = field(default_factory=dict)  # those of which the end is not known, and their objects


class Reads:
    """One engine's questions and answers over one region of memory.

    Args:
        memory: (address, bytes), readable by every peer that reaches the engine, and written to by those that were
            asked. timeout: seconds of a task, after which nothing of it is written any more.
    """

    def __init__(self, engine: TransferEngine, memory: tuple[int, int], *, timeout: float = 30.0) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= LONGEST:
            raise ConfigError(f"timeout={timeout!r}: seconds, above 0 and at most {LONGEST:g}")
        self.engine, self.timeout, self.nbytes = engine, float(timeout), memory[1]
        self._handle, desc = engine.reg_mr(memory)  # what we answer from: nobody is told of it
        size = min(engine.max_message, 1 << 16)
        self._most = (size - len(desc.to_bytes()) - 512) // 32  # objects of one message
        if self._most < 1:
            raise ConfigError(f"messages of {size} bytes are too short to ask for anything")
        self.rights = Rights(engine, memory)
        self._lock = threading.Lock()
        self._tasks: dict[int, _Task] = {}
        self._pool = engine.submit_recvs(size, _BUFFERS, self._on_word)

    def submit(self, peer: NetAddr, local: Sequence[Range], remote: Sequence[Range]) -> int:
        """Ask a peer to write ranges of its memory to ranges of ours; return the task's number.

        Raises BadRange: different numbers of ranges, sizes that differ, or ours are outside of our memory; QueueFull
        and what else registering memory and taking an immediate do.
        """
        self._check(local, remote)
        self._sweep()
        deadline = time.monotonic() + self.timeout
        right = self.rights.of(peer)
        task = _Task(right, self.engine.alloc_imm(), [False] * len(local), deadline)
        task.parts = {
            number: range(first, min(first + self._most, len(local)))
            for number, first in enumerate(range(0, len(local), self._most))
        }
        number = secrets.randbits(62)  # whoever cannot guess it cannot end the task
        with self._lock:
            self._tasks[number] = task
        for part, objects in list(task.parts.items()):
            word = Read(
                str(self.engine.address), number, part, right.desc, task.imm, self.timeout,
                [remote[i][0] for i in objects], [local[i][0] for i in objects], [local[i][1] for i in objects],
            )  # fmt: skip
            # One that was not heard may have been all the same: the right tells what becomes of its writes.
            self._say(peer, word, lambda: setattr(right, "over", True))
        return number

    def status(self, number: int) -> list[bool] | None:
        """Return which objects came, once nothing more is written, and forget the task; None before. Raises KeyError.

        Waits for copies under way if the peer's right to write has to be taken back.
        """
        with self._lock:
            task = self._tasks.get(number)
            if task is None:
                raise KeyError(f"no read has the number {number}, or its end was told already")
            whole = not task.parts and self.engine.imm_count(task.imm) >= sum(task.good)
            if not whole and not task.right.over and time.monotonic() < task.deadline:
                return None
            del self._tasks[number]
        return self._end(task, whole)

    def forget(self, peer: NetAddr) -> None:
        """Drop all tasks of a peer; it writes nothing any more."""
        self._drop(lambda task: task.right.peer == peer)
        self.rights.drop(peer)

    def close(self) -> None:
        """Answer and ask no more; nobody writes here any more. The engine stays open."""
        self._pool.close()
        self._drop(lambda task: True)
        self.rights.close()
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

    def _end(self, task: _Task, whole: bool) -> list[bool]:
        if not whole:  # of what the peer has said, nobody knows whether it came
            self.rights.revoke(task.right)
            task.good = [False] * len(task.good)
        self.engine.free_imm(task.imm)
        return task.good

    def _sweep(self) -> None:
        """End tasks that nobody asks for any more: LMCache may give a load up without a word."""
        old = time.monotonic() - _FORGOTTEN
        self._drop(lambda task: task.deadline < old)

    def _drop(self, which: Any) -> None:
        with self._lock:
            gone = [number for number, task in self._tasks.items() if which(task)]
            tasks = [self._tasks.pop(number) for number in gone]
        for task in tasks:
            self._end(task, not task.parts)

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
        answer = Answer(self.engine, read, self._say)
        if wrong := read.wrong(self.nbytes):
            log.warning("%s asks for %s", read.asker, wrong)
            self._say(NetAddr.parse(read.asker), Ended(read.task, read.part, [False] * len(read.sizes)))
        else:
            answer.start(self._handle)

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
