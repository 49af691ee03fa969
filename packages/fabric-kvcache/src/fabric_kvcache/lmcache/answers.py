"""The peer's side of a read: the words of the question, and the writes that answer it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from fabric_core import FabricError, MrDesc, NetAddr, Pages, Transfer, TransferEngine

__all__ = ["LONGEST", "Answer", "Ended", "Read"]

log = logging.getLogger("fabric.kvcache.lmcache")
LONGEST = 86400.0  #: seconds that a question may give


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

    def wrong(self, nbytes: int) -> str:
        """Return what is wrong with it where memory has so many bytes; "": nothing. Anybody may have sent it."""
        ranges = zip(self.remote, self.local, self.sizes, strict=False)
        if not len(self.remote) == len(self.local) == len(self.sizes) or not 0 < self.seconds <= LONGEST:
            return f"{len(self.remote)} ranges, {len(self.sizes)} sizes, {self.seconds} seconds"
        if any(min(there, at) < 0 or size < 1 or there + size > nbytes for there, at, size in ranges):
            return f"what is not in {nbytes} bytes of memory"
        return ""


class Ended(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="e"):
    """All writes of a question have ended; nothing of it will be written any more."""

    task: int
    part: int
    good: list[bool]


class Answer:
    """The writes of one question: one operation for all objects of one size. `say` hears the end."""

    def __init__(self, engine: TransferEngine, read: Read, say: Callable[[NetAddr, Ended], object]) -> None:
        self._engine, self._read, self._say = engine, read, say
        self._asker, self._desc = NetAddr.parse(read.asker), MrDesc.from_bytes(read.desc)
        self._good = [False] * len(read.sizes)
        self._left = 1
        self._lock = threading.Lock()

    def start(self, handle: Any) -> None:
        """Post them, from the memory of `handle`."""
        groups: dict[int, list[int]] = {}
        for i, size in enumerate(self._read.sizes):
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
        remote = [self._read.remote[i] for i in members]
        local = [self._read.local[i] for i in members]
        unit = math.gcd(*remote, *local) or 1
        source, target = Pages([at // unit for at in remote], unit), Pages([at // unit for at in local], unit)

        def on_done(transfer: Transfer) -> None:
            self._over(members, transfer.state == "done")

        self._engine.submit_paged_writes(
            size, self._read.imm, (handle, source), (self._desc, target), on_done, timeout=self._read.seconds
        )

    def _over(self, members: list[int], good: bool) -> None:
        with self._lock:
            for i in members:
                self._good[i] = good
            self._left -= 1
            last = not self._left
        if last:
            self._say(self._asker, Ended(self._read.task, self._read.part, self._good))
