"""The writes of one update: posted, remembered in their order, waited for, and ended when the update is broken off."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fabric_core import MrDesc, MrHandle, NetAddr, Pages, Transfer, TransferEngine, WaitTimeout
from fabric_rlweights.arena import Arena
from fabric_rlweights.tasks import Target

__all__ = ["Links", "SentStats", "Writes"]

WINDOW = 1024  #: transfers of one rank under way: more do not make a NIC faster


@dataclass
class Links:
    """Where an update goes: given by the controller for each of them."""

    tensors: dict[int, dict[int, MrDesc]]  #: inference rank -> its tensors
    imms: dict[int, int]  #: inference rank -> immediate
    trainers: dict[int, tuple[MrDesc, int]]  #: trainer rank -> where magnitudes go
    addrs: dict[int, NetAddr]  #: trainer rank -> its engine


@dataclass
class SentStats:
    """What an update took on this rank. Seconds and bytes."""

    seconds: float = 0.0
    prepare: float = 0.0  #: packing, casting, quantising (or handing that to a GPU), posting; what else runs meanwhile
    exchange: float = 0.0  #: waiting for the neighbours' magnitudes
    waiting: float = 0.0  #: for a GPU, for room under the watermark, or for the last transfers
    bytes: int = 0
    straight: int = 0  #: of them, written without a copy
    fetched: int = 0  #: copied from host memory to a GPU, to be made into what is written
    writes: int = 0
    peak: int = 0  #: temporary memory
    digests: dict[int, dict[int, int]] = field(default_factory=dict)  #: inference rank -> tensor -> sum


class Writes:
    """Those of one update. Ranges of the arena go back when what is written out of them has been."""

    def __init__(
        self,
        engine: TransferEngine,
        arena: Arena,
        links: Links,
        deadline: float,
        check: Callable[[], None],
        stats: SentStats,
    ) -> None:
        self._engine, self._arena, self._links = engine, arena, links
        self._deadline, self._check, self._stats = deadline, check, stats
        self._under_way: deque[tuple[list[Transfer], int, int]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def left(self) -> float:
        """Seconds until the deadline, and a moment after it."""
        return max(0.001, self._deadline - time.monotonic())

    def post(self, handle: MrHandle, mine: Any, theirs: Any, run: int, target: Target, tensor: int) -> Transfer:
        """Write runs at `mine` [n] in registered memory to `theirs` [n] in a tensor of the target's rank."""
        desc, imm = self._links.tensors[target.receiver][tensor], self._links.imms[target.receiver]
        self._stats.writes += len(theirs)
        if len(theirs) == 1:
            place = (handle, int(mine[0])), (desc, int(theirs[0]))
            return self._engine.submit_single_write(run, imm, *place, timeout=self.left)
        source, there = _pages(mine), _pages(theirs)
        return self._engine.submit_paged_writes(run, imm, (handle, source), (desc, there), timeout=self.left)

    def remember(self, transfers: list[Transfer], at: int = 0, nbytes: int = 0) -> None:
        """These are of one task; `nbytes` of the arena at `at` are its own."""
        self._under_way.append((transfers, at, nbytes))
        while len(self._under_way) > WINDOW:
            self.oldest()

    def oldest(self) -> None:
        """Wait for the oldest task's writes, and give its memory back."""
        started = time.monotonic()
        transfers, at, nbytes = self._under_way[0]
        for transfer in transfers:
            self._wait(transfer)
        self._under_way.popleft()
        if nbytes:
            self._arena.give(at, nbytes)
        self._stats.waiting += time.monotonic() - started

    def drain(self) -> None:
        """Wait for all, the newest first: when that has ended, most others have, and this thread is woken once.

        On few cores each of its wake-ups takes a core from the copying.
        """
        started = time.monotonic()
        for transfers, _at, _nbytes in reversed(self._under_way):
            for transfer in reversed(transfers):
                self._wait(transfer)
        while self._under_way:
            _transfers, at, nbytes = self._under_way.popleft()
            if nbytes:
                self._arena.give(at, nbytes)
        self._stats.waiting += time.monotonic() - started

    def _wait(self, transfer: Transfer) -> None:
        """Wait for its end, asking `check` now and then.

        Only `wait` is called, never `done`: that counts as polling, and on few cores the engine's worker leaves the
        work to whoever polls (decision 0002), which this thread does not do while it sleeps.
        """
        while True:
            self._check()
            try:
                transfer.wait(min(0.2, self.left))
                return
            except WaitTimeout:
                continue

    def stop(self) -> None:
        """Cancel what is under way, and wait for its end: afterwards no NIC reads or writes for this update."""
        for transfers, _at, _nbytes in self._under_way:
            for transfer in transfers:
                transfer.cancel()
        for transfers, at, nbytes in self._under_way:
            for transfer in transfers:
                try:
                    transfer.wait(5.0)
                except Exception:  # how it ended does not matter any more, that it ended does
                    pass
            if nbytes:
                self._arena.give(at, nbytes)
        self._under_way.clear()


def _pages(places: Any) -> Pages:
    """Byte offsets as indices with one stride."""
    first = int(places[0])
    step = int(np.gcd.reduce(places - first)) or 1
    return Pages(((places - first) // step).astype(np.uint32), step, first)
