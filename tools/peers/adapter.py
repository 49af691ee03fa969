"""What a library must offer to be measured here: one class with these methods, used in both processes.

Only the standard library is imported: each peer has an interpreter of its own.
"""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["PING", "PONG", "SMALL", "Adapter", "Missing", "Span", "address_of", "anonymous"]

#: (offset, bytes) within the measured memory.
Span = tuple[int, int]

SMALL = 64  #: bytes of a ping
PING = 0  #: where a ping lands in the target's memory
PONG = 4096  #: where its answer lands in the initiator's


class Missing(Exception):
    """The library has no such operation."""


def anonymous(nbytes: int) -> mmap.mmap:
    """Return private memory that nobody prepared for sharing, every page of it touched."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, nbytes, mmap.PAGESIZE):
        memory[offset] = 1
        memory[offset] = 0
    return memory


def address_of(memory: Any) -> int:
    """Return where a writable buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Adapter(ABC):
    """One library. Writes go to the same offset of the other side's memory.

    A *notification* is the library's own way to tell the other side's program that earlier writes have landed.
    """

    name = "?"
    distribution = ""  #: what pip calls it
    memory: Any  #: the measured memory, set by `open`: a writable buffer
    #: The library moves data on threads of its own: whoever waits leaves them the core.
    threaded = False
    #: The target takes part in each write: it is told what to `expect` beforehand.
    two_sided = False

    @abstractmethod
    def open(self, role: str, nbytes: int) -> Any:
        """Make the endpoint and register `nbytes`; what is returned is handed to the other side's `connect`."""

    @abstractmethod
    def connect(self, other: Any) -> None: ...

    def close(self) -> None:  # noqa: B027
        """Leave in good order, if the library cares."""

    @abstractmethod
    def write(self, offset: int, nbytes: int) -> Any:
        """Start a write; at most one at a time is in flight for a given offset."""

    @abstractmethod
    def done(self, operation: Any) -> bool:
        """Poll once: has it completed here? Raises if it ended badly."""

    @abstractmethod
    def notify(self) -> None:
        """Raise one notification. All earlier writes are `done`."""

    @abstractmethod
    def poll(self) -> int:
        """Return how many notifications are new."""

    @abstractmethod
    def write_notify(self, offset: int, nbytes: int) -> None:
        """Start a small write that raises a notification when it has landed."""

    @abstractmethod
    def paged(self, page: int, here: Sequence[int], there: Sequence[int]) -> tuple[Callable[[], Any], int]:
        """Build a request for many pages.

        Returns what posts it (and then returns an operation), and how many notifications it raises by itself.
        """

    def progress(self) -> None:  # noqa: B027
        """Do a step of the library's work while the initiator waits for the target."""

    def expect(self, spans: Sequence[Span]) -> None:  # noqa: B027
        """Target of a two-sided library: these will be written, in this order."""

    def allocate(self, nbytes: int) -> Any:
        """Return touched memory for `register`."""
        return anonymous(nbytes)

    def register(self, memory: Any) -> Any:
        raise Missing("no registration in this API")

    def deregister(self, registration: Any) -> None:
        raise Missing("no registration in this API")
