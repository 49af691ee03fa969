"""What a decoder gets: a prompt's KV, complete, still in its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric_core import StaleHandle
from fabric_kvcache.layout import KvLayout, unpack
from fabric_kvcache.pool import PageLease
from fabric_kvcache.protocol import KvRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ReceivedKv"]


class ReceivedKv:
    """A prompt's KV, complete. Reads copy out of the pages, which stay taken until `release` (or the end of `with`)."""

    def __init__(self, layout: KvLayout, lease: PageLease, request: KvRequest) -> None:
        self.layout = layout
        self.tokens = len(request.tokens)
        self.writes = request.writes
        self.nbytes = layout.layers * len(lease.pages) * layout.page_bytes + request.tail_bytes
        self._lease = lease

    @property
    def pages(self) -> NDArray[np.uint32]:
        """Which pages of the pool it lies in, in order."""
        return self._lease.pages

    def layer(self, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Copy a layer's keys and values, each `[head, token, dim]`, as words of the element's width."""
        self._check()
        return unpack(self._lease.pool.view[layer], self._lease.pages, self.tokens)

    @property
    def tail(self) -> bytes:
        """Copy the tail."""
        self._check()
        return self._lease.tail.tobytes()

    def _check(self) -> None:
        if self._lease.state != "held":
            raise StaleHandle("this KV was released: its pages may belong to another request")

    def release(self) -> None:
        """Give the pages back. Idempotent."""
        self._lease.release()

    def __enter__(self) -> ReceivedKv:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
