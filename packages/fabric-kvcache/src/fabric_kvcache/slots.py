"""Small places of one size in one registered memory: where seals and tails are written to, and from."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from fabric_core import MrDesc, MrHandle, TransferEngine
from fabric_kvcache.pool import PoolExhausted

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SlotPool"]

_ALIGN = 64  # a cache line, and more than any element needs


class SlotPool:
    """`count` slots of `nbytes` each. `what` they are called in an error. Any thread may take and give back."""

    def __init__(self, engine: TransferEngine, count: int, nbytes: int, *, write: bool, what: str) -> None:
        self.count = count
        self.nbytes = nbytes
        self._what = what
        self._engine = engine
        self._write = write
        self._stride = max(_ALIGN, -(-nbytes // _ALIGN) * _ALIGN)
        self.memory = engine.empty(count * self._stride)
        self.octets: NDArray[np.uint8] = np.frombuffer(self.memory, dtype=np.uint8)
        self.handle, self.desc = self.register()
        self._lock = threading.Lock()  # guards the one below
        self._free = deque(range(count))

    def register(self) -> tuple[MrHandle, MrDesc]:
        """Register the memory once more, under a key of its own that can be revoked by itself."""
        return self._engine.reg_mr(self.memory, write=self._write)

    @property
    def free(self) -> int:
        with self._lock:
            return len(self._free)

    def take(self) -> int:
        """Return the number of a free slot. Raises PoolExhausted."""
        with self._lock:
            if not self._free:
                raise PoolExhausted(f"all {self.count} {self._what} are in use: finish other requests, or allow more")
            return self._free.popleft()

    def give(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)

    def offset(self, slot: int) -> int:
        return slot * self._stride

    def at(self, slot: int) -> NDArray[np.uint8]:
        """The slot's bytes, in place."""
        start = self.offset(slot)
        return self.octets[start : start + self.nbytes]

    def close(self, timeout: float = 5.0) -> None:
        """End the registration. Idempotent."""
        self.handle.close(timeout)
