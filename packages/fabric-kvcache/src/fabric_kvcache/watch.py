"""Hears of the loss of one peer: an expectation that nothing can fulfil, and that names the peer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fabric_core import Cancelled, EngineClosed, FabricError, NetAddr, StaleHandle, TransferEngine

__all__ = ["PeerWatch"]

_NEVER = 1 << 40


class PeerWatch:
    """`on_lost(error)` is called once, on the callback thread, when the peer is lost; never after `close`."""

    def __init__(self, engine: TransferEngine, peer: NetAddr, on_lost: Callable[[FabricError], object]) -> None:
        self._engine = engine
        self._on_lost: Callable[[FabricError], object] | None = on_lost
        self._imm: int | None = engine.alloc_imm()
        try:
            engine.expect_imm_count(self._imm, _NEVER, self._ended, timeout=math.inf, peers=[peer])
        except FabricError:
            self.close()
            raise

    def _ended(self, expectation: Any) -> None:
        on_lost, error = self._on_lost, expectation.exception()
        self.close()
        if on_lost is not None and error is not None and not isinstance(error, Cancelled):
            on_lost(error)

    @property
    def open(self) -> bool:
        """Whether `on_lost` may still be called."""
        return self._imm is not None

    def close(self) -> None:
        """Idempotent."""
        imm, self._imm, self._on_lost = self._imm, None, None
        if imm is not None:
            try:
                self._engine.free_imm(imm)
            except (StaleHandle, EngineClosed):  # the engine is closed: its immediates are gone
                pass
