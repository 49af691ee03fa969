"""What a decoder gets: a prompt's KV, complete, still in its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric_core import BadRange, StaleHandle
from fabric_kvcache.cache import show_layers
from fabric_kvcache.layout import unpack
from fabric_kvcache.pool import PageLease
from fabric_kvcache.request import Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fabric_kvcache.decoder import Decoder
    from fabric_kvcache.tables import Tables

__all__ = ["ReceivedKv"]


class ReceivedKv:
    """A prompt's KV, complete. Reads copy out of the pages, which stay taken until `release` (or the end of `with`)."""

    def __init__(
        self, decoder: Decoder, lease: PageLease, slot: int, request: Request, writes: int, nbytes: int
    ) -> None:
        self.request = request
        self.tokens = request.total
        self.start = request.start  #: tokens that were not moved, because the decoder had them
        self.writes = writes  #: how many writes brought it, the tail included
        self.nbytes = nbytes  #: of those
        self._decoder = decoder
        self._lease = lease
        self._slot = slot

    @property
    def tables(self) -> Tables:
        """Which pages of each group's pool it lies in, in order."""
        return self._lease.tables

    @property
    def pages(self) -> NDArray[np.uint32]:
        """Those of the first group."""
        return self._lease.pages

    def layer(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Copy a layer's keys and values, each `[head, token, dim]`, as words of the element's width.

        `layer` is the model's. Raises BadRange for one of another stage, ConfigError for a pool whose pages are not
        laid out as this package does it.
        """
        self._check()
        pool = self._lease.pool
        if layer not in pool.shard.layers(0):
            raise BadRange(f"layer {layer}: this rank has {show_layers(pool.shard.layers(0))}")
        return unpack(pool.view[pool.shard.layers(0).index(layer)], self._lease.pages, self.tokens)

    @property
    def tail(self) -> bytes:
        """Copy the tail."""
        self._check()
        return self._decoder._tail(self._slot).tobytes()

    def _check(self) -> None:
        if self._lease.state != "held":
            raise StaleHandle("this KV was released: its pages may belong to another request")

    def release(self) -> None:
        """Give the pages back. Idempotent."""
        self._decoder._give(self._lease, self._slot)

    def __enter__(self) -> ReceivedKv:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
