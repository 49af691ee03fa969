"""A paged KV memory that is registered with an engine, and who holds which of its pages.

A page is in one of three states: free, held by a lease, or in quarantine. A lease that ended badly while a remote write
could still land is not given back but quarantined: its pages stay out of use until the pool is closed. That costs
memory and never corrupts another request.

Any thread may lease and give back.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fabric_core import FabricError, TransferEngine
from fabric_kvcache.layout import KvLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Missing", "PageLease", "PagePool", "PoolExhausted"]

_ALIGN = 64  # of a tail: a cache line, and more than any element needs
_POISON = 0xFF  # as bytes of any float format of ITEM_BYTES: a NaN that no computation makes


class PoolExhausted(FabricError):
    """Not enough free pages, or no free tail. The text tells how many are held, and how many are in quarantine."""


class Missing(NamedTuple):
    """A page that was not written, or not to its end."""

    layer: int
    number: int  #: which of the request's pages
    page: int  #: which of the pool's

    def __str__(self) -> str:
        return f"layer {self.layer} page {self.number} (pool page {self.page})"


class PageLease:
    """Pages (the same in every layer) and one tail, held until `release` or `quarantine`. The first call counts."""

    def __init__(self, pool: PagePool, pages: NDArray[np.uint32], slot: int) -> None:
        self.pool = pool
        self.pages = pages
        self.slot = slot
        self.state = "held"

    @property
    def tail_offset(self) -> int:
        return self.pool.tail_offset(self.slot)

    @property
    def tail(self) -> NDArray[np.uint8]:
        """The tail's bytes, in place."""
        start = self.tail_offset
        return self.pool.octets[start : start + self.pool.tail_bytes]

    def poison(self) -> None:
        """Fill with NaN, so that a page that is never written cannot pass for one."""
        self.pool.view[:, self.pages] = np.array(-1).astype(self.pool.layout.word)
        self.tail[:] = _POISON

    def missing(self) -> list[Missing]:
        """Return pages that still hold poison."""
        poison = np.array(-1).astype(self.pool.layout.word)
        found = []
        for layer, view in enumerate(self.pool.view):  # one by one: the copies stay in the CPU's cache
            bad = (view[self.pages].reshape(len(self.pages), -1) == poison).any(axis=1)
            found += [Missing(layer, int(k), int(self.pages[k])) for k in np.flatnonzero(bad)]
        return found

    def tail_missing(self) -> bool:
        """Tell whether nothing was written into the tail."""
        return bool(self.tail.size and (self.tail == _POISON).all())

    def release(self) -> None:
        """Give the pages back. Only when no write into them, or out of them, can be under way."""
        self.pool._end(self, "released")

    def quarantine(self) -> None:
        """Take the pages out of use, because a write may still land."""
        self.pool._end(self, "quarantined")


class PagePool:
    """`pages` pages of each layer and `tails` tails of `tail_bytes`, in one registered memory of `engine.empty()`.

    `write`: may peers write it. `seed`: hand pages out in an order drawn from it, for tests; None: first in, first out.
    """

    def __init__(
        self,
        engine: TransferEngine,
        layout: KvLayout,
        pages: int,
        *,
        tail_bytes: int,
        tails: int = 8,
        write: bool,
        seed: int | None = None,
    ) -> None:
        if pages < 1 or tails < 1 or tail_bytes < 0:
            raise ValueError(f"a pool of {pages} pages and {tails} tails of {tail_bytes} bytes")
        self.layout = layout
        self.pages = pages
        self.tail_bytes = tail_bytes
        self._stride = -(-tail_bytes // _ALIGN) * _ALIGN
        self._base = -(-layout.pool_bytes(pages) // _ALIGN) * _ALIGN
        self._engine = engine
        self.memory = engine.empty(self._base + max(_ALIGN, tails * self._stride))
        self.handle, self.desc = engine.reg_mr(self.memory, write=write)
        self.view: NDArray[Any] = layout.view(self.memory, pages)
        self.octets: NDArray[np.uint8] = np.frombuffer(self.memory, dtype=np.uint8)
        order = list(range(pages))
        if seed is not None:
            random.Random(seed).shuffle(order)
        self._lock = threading.Lock()  # guards the four below
        self._free = order
        self._free_slots = list(range(tails))
        self._quarantined = 0
        self._closed = False

    def tail_offset(self, slot: int) -> int:
        return self._base + slot * self._stride

    @property
    def free(self) -> int:
        with self._lock:
            return len(self._free)

    @property
    def quarantined(self) -> int:
        with self._lock:
            return self._quarantined

    def lease(self, count: int) -> PageLease:
        """Take `count` pages and a tail. Raises PoolExhausted."""
        with self._lock:
            if count > len(self._free) or not self._free_slots:
                what = f"{count} pages" if count > len(self._free) else "a tail"
                raise PoolExhausted(
                    f"{what} wanted: of {self.pages} pages {len(self._free)} are free and {self._quarantined} in "
                    f"quarantine, {len(self._free_slots)} tails are free; finish other requests or make the pool larger"
                )
            taken, self._free = self._free[:count], self._free[count:]
            return PageLease(self, np.array(taken, dtype=np.uint32), self._free_slots.pop(0))

    def _end(self, lease: PageLease, state: str) -> None:
        with self._lock:
            if lease.state != "held":
                return
            lease.state = state
            if state == "released":
                self._free.extend(int(page) for page in lease.pages)
                self._free_slots.append(lease.slot)
            else:
                self._quarantined += len(lease.pages)

    def close(self, timeout: float = 5.0) -> None:
        """End the registration: no peer can write from here on. Idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._engine.dereg_mr(self.handle, timeout)
