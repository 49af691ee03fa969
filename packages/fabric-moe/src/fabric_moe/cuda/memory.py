"""The memory of one generation on a GPU, and when it may be given back: not before all others have left it too.

A peer that has mapped memory cannot be stopped from writing into it. So a rank that leaves says so in the notes of all
others, as one that gives up does, and frees its own memory when each of them has said either. Until then it is kept;
`sweep` looks again whenever a generation begins or ends. Memory that a killed rank had mapped is kept for good.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping

from fabric_core import BackendError
from fabric_moe.cuda.driver import Device
from fabric_moe.cuda.layout import GpuLayout
from fabric_moe.cuda.report import Words

__all__ = ["Memory", "sweep"]

log = logging.getLogger("fabric.moe")

_PAUSE = 0.001  # seconds between looks at what ranks of other processes have noted


class Memory:
    """What peers write into, what only this rank uses, and the words for the host. Raises BackendError."""

    def __init__(self, device: Device, layout: GpuLayout, rank: int) -> None:
        self.device = device
        self.layout = layout
        self.rank = rank
        self.inbound = self.local = self.words = 0
        self._others: tuple[int, ...] = ()
        try:
            self.inbound = device.allocate(layout.in_bytes)
            self.local = device.allocate(layout.local_bytes)
            self.words = device.host_words(ctypes.sizeof(Words))
        except BackendError as error:
            self._free()
            raise BackendError(
                f"{error}; this rank wants {layout.memory()['total']} bytes: lower max_tokens or depth"
            ) from error

    def shown_to(self, others: Iterable[int]) -> None:
        """From now on these ranks may write here."""
        self._others = tuple(others)

    def say_goodbye(self, peers: Mapping[int, int]) -> None:
        """Leave a note with all others, whose memory lies at these addresses, unless a kernel has left one."""
        if Words.from_address(self.words).lost:
            return
        note = (1 << self.rank).to_bytes(8, "little")
        for at in peers.values():
            try:
                self.device.put(at + self.layout.in_notes + 8 * self.rank, note)
            except BackendError as error:
                log.warning("rank %d cannot tell another that it leaves: %s", self.rank, error)

    def still_here(self) -> list[int]:
        """Return the other ranks that have neither left nor given up, and may write here."""
        if not self._others:
            return []
        notes = memoryview(self.device.get(self.inbound + self.layout.in_notes, 8 * (max(self._others) + 1))).cast("Q")
        return [rank for rank in self._others if not notes[rank]]

    def release(self, foreign: Collection[int] = (), patience: float = 0.0) -> None:
        """Free it now, or when `sweep` finds that all others have left.

        Waits at most `patience` seconds for ranks of other processes; those of this one may need its thread to leave.
        """
        deadline = time.monotonic() + patience
        try:
            while missing := self.still_here():
                if time.monotonic() >= deadline or not set(missing).issubset(foreign):
                    log.info("rank %d keeps %d bytes: %s may write there", self.rank, self.layout.in_bytes, missing)
                    with _LOCK:
                        _KEPT.append(self)
                    return
                time.sleep(_PAUSE)  # other processes: there is nothing to be woken by
        except BackendError as error:
            log.warning("memory of rank %d is not given back: %s", self.rank, error)
            return
        self._free()

    def _free(self) -> None:
        try:
            for at in filter(None, (self.inbound, self.local)):
                self.device.free(at)
            if self.words:
                self.device.free_host(self.words)
        except BackendError as error:
            log.warning("memory of rank %d is not given back: %s", self.rank, error)
        self.inbound = self.local = self.words = 0


_KEPT: list[Memory] = []
_LOCK = threading.Lock()


def sweep() -> None:
    """Free what was kept for ranks that have left since."""
    with _LOCK:
        kept, _KEPT[:] = list(_KEPT), []
    for memory in kept:
        memory.release()
