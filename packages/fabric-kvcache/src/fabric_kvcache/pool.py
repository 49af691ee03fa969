"""A paged KV memory that is registered with an engine, and who holds which of its pages.

A page is in one of three states: free, held by a lease, or in quarantine. A lease that ended while a remote write could
still land is quarantined: its pages stay out of use until the writer has confirmed its end, has lost the right to
write, or is known to be gone; then they are released. That costs memory for a while and never corrupts another request.

Any thread may lease and give back.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_core import ConfigError, FabricError, MrDesc, MrHandle, TransferEngine
from fabric_kvcache import poison
from fabric_kvcache.cache import AttentionGroup, CacheLayout
from fabric_kvcache.layout import KvLayout
from fabric_kvcache.poison import Missing
from fabric_kvcache.shard import Shard
from fabric_kvcache.tables import Tables, checked, needed

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Missing", "PageLease", "PagePool", "PoolExhausted", "as_layout"]


class PoolExhausted(FabricError):
    """Not enough free pages, or no free slot. The text tells how many are held, and how many are in quarantine."""


def as_layout(layout: KvLayout | CacheLayout) -> CacheLayout:
    """Return a uniform layout as a general one."""
    return CacheLayout.of(layout) if isinstance(layout, KvLayout) else layout


class PageLease:
    """Pages of every group, held until `release` or in `quarantine` until then.

    `owned`: the pool's own pages, which go back to it; else those of the user's allocator, which are only named.
    """

    def __init__(self, pool: PagePool, tables: Tables, *, owned: bool) -> None:
        self.pool = pool
        self.tables = tables
        self.owned = owned
        self.state = "held"

    @property
    def pages(self) -> NDArray[np.uint32]:
        """Those of the first group."""
        return self.tables[0]

    def poison(self, start: int, total: int) -> None:
        """Fill with NaN, so that a page that is never written cannot pass for one."""
        poison.fill(self.pool.octets, self.pool.shard, self.tables, start, total)

    def missing(self, start: int, total: int) -> list[Missing]:
        """Return pages that still hold poison."""
        return poison.missing(self.pool.octets, self.pool.shard, self.tables, start, total)

    def release(self) -> bool:
        """Give the pages back; whether this call did it. Only when no write into or out of them can be under way."""
        return self.pool._end(self, "released")

    def quarantine(self) -> None:
        """Take the pages out of use, because a write may still land."""
        self.pool._end(self, "quarantined")


class PagePool:
    """One rank's pools in one memory: `shard` says where each group's pages lie.

    `memory`: the user's (tensor, array, buffer, or (address, bytes[, device])); None: `engine.empty()`. `seed`: hand
    pages out in an order drawn from it, for tests; None: first in, first out.
    """

    def __init__(
        self, engine: TransferEngine, shard: Shard, *, memory: Any = None, write: bool, seed: int | None = None
    ) -> None:
        self.shard = shard
        self.own = memory is None
        self._engine = engine
        self._write = write
        self.memory = engine.empty(shard.nbytes) if memory is None else memory
        self.handle, self.desc = self.register()
        if self.handle.nbytes < shard.nbytes:
            self.handle.close()
            raise ConfigError(f"a memory of {self.handle.nbytes} bytes for pools that need {shard.nbytes}")
        self._lock = threading.Lock()  # guards the three below
        self._free: list[deque[int]] = []
        for pages in shard.pool_pages:
            order = list(range(pages))
            if seed is not None:
                random.Random(seed).shuffle(order)
            self._free.append(deque(order))
        self._quarantined = 0
        self._closed = False

    def register(self) -> tuple[MrHandle, MrDesc]:
        """Register the memory once more, under a key of its own that can be revoked by itself."""
        return self._engine.reg_mr(self.memory, write=self._write)

    @property
    def octets(self) -> NDArray[np.uint8]:
        """The memory's bytes. Raises ConfigError where the host cannot reach it."""
        if self.own:
            return np.frombuffer(self.memory, dtype=np.uint8)
        try:
            found = np.asarray(self.memory.numpy() if hasattr(self.memory, "numpy") else self.memory)
            return found.reshape(-1).view(np.uint8)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ConfigError(f"this memory cannot be read by the host ({error}): leave verify out") from None

    @property
    def view(self) -> NDArray[Any]:
        """Words `[layer, page, head, K or V, token, dim]` of a pool of attention pages in the order of this package.

        Raises ConfigError for any other layout: its pages are the user's to read.
        """
        groups = self.shard.layout.groups
        group = groups[0]
        if len(groups) > 1 or not isinstance(group, AttentionGroup) or group.letters != "LPHKT":
            raise ConfigError('only pools with one attention group in the order "head-HND" can be seen as one array')
        if group.scale_bytes or group.page_bytes:
            raise ConfigError("pools with scales or padding cannot be seen as one array")
        field = self.shard.fields(0)[0]
        words = self.octets[field.base :].view(f"<u{group.item_bytes}")
        layers, pages = len(self.shard.layers(0)), self.shard.pool_pages[0]
        shape = (layers, pages, field.count, 2, group.page_tokens, group.head_dim)
        return words[: int(np.prod(shape))].reshape(shape)

    @property
    def pages(self) -> int:
        """Of all groups together."""
        return sum(self.shard.pool_pages)

    @property
    def free(self) -> int:
        with self._lock:
            return sum(len(pages) for pages in self._free)

    @property
    def quarantined(self) -> int:
        """Pages of ended requests into which a write may still land."""
        with self._lock:
            return self._quarantined

    def lease(self, total: int) -> PageLease:
        """Take the pages of a prompt of `total` tokens. Raises PoolExhausted."""
        counts = needed(self.shard.layout, total)
        with self._lock:
            for number, (count, free) in enumerate(zip(counts, self._free, strict=True)):
                if count > len(free):
                    which = f" of group {number}" if len(counts) > 1 else ""
                    raise PoolExhausted(
                        f"{count} pages{which} wanted: of {self.shard.pool_pages[number]} pages {len(free)} are free "
                        f"and {self._quarantined} in quarantine; finish other requests or make the pool larger"
                    )
            taken = [
                np.array([free.popleft() for _ in range(n)], np.uint32)
                for n, free in zip(counts, self._free, strict=True)
            ]
        return PageLease(self, tuple(taken), owned=True)

    def borrow(self, tables: Sequence[Any], start: int, total: int) -> PageLease:
        """Name pages that the user's own allocator chose. Raises BadRange."""
        return PageLease(self, checked(self.shard, tables, start, total), owned=False)

    def _end(self, lease: PageLease, state: str) -> bool:
        count = sum(len(table) for table in lease.tables)
        with self._lock:
            before = lease.state
            if before in {state, "released"}:
                return False
            lease.state = state
            if before == "quarantined":
                self._quarantined -= count
            if state == "quarantined":
                self._quarantined += count
            elif lease.owned:
                for table, free in zip(lease.tables, self._free, strict=True):
                    free.extend(table.tolist())
        return True

    def close(self, timeout: float = 5.0) -> None:
        """End the registration: no peer can write from here on. Idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self.handle.close(timeout)
