"""Who may write into our memory: each peer under a registration of its own, which can be taken back.

A write that nobody waits for any more must not land later, when its memory is in use for something else. The one way to
be sure of a peer that does not answer is that its right is gone.
"""

from __future__ import annotations

import logging
import threading

from fabric_core import FabricError, NetAddr, TransferEngine
from fabric_kvcache.watch import PeerWatch

__all__ = ["Right", "Rights"]

log = logging.getLogger("fabric.kvcache.lmcache")
_CLOSE = 5.0  #: seconds; deregistering waits for copies under way


class Right:
    """One peer's right to write. `over`: it is lost, or has lost it; nothing new is asked under this right."""

    def __init__(self, engine: TransferEngine, memory: tuple[int, int], peer: NetAddr) -> None:
        self.peer, self.over = peer, False
        self._closing = threading.Lock()
        self._handle, desc = engine.reg_mr(memory)
        self.desc = desc.to_bytes()
        try:
            self._watch = PeerWatch(engine, peer, self._lost)
        except FabricError:
            self._handle.close(_CLOSE)
            raise

    def _lost(self, error: FabricError) -> None:
        # Only marked: deregistering waits, and this is the callback thread.
        log.warning("%s is lost [%s]", self.peer, getattr(error, "code", type(error).__name__))
        self.over = True

    def revoke(self) -> None:
        """Have the peer write nothing any more. Returns when that is so; idempotent, and safe from any thread."""
        self.over = True
        with self._closing:
            self._watch.close()
            try:
                self._handle.close(_CLOSE)
            except FabricError as error:
                log.error("the right of %s to write could not be revoked: %s", self.peer, error)


class Rights:
    """The rights of all peers to one region. `memory`: (address, bytes)."""

    def __init__(self, engine: TransferEngine, memory: tuple[int, int]) -> None:
        self._engine, self._memory = engine, memory
        self._lock = threading.Lock()
        self._rights: dict[NetAddr, Right] = {}

    def knows(self, peer: NetAddr) -> bool:
        """Whether a peer has a right, and was not lost since it got it."""
        with self._lock:
            right = self._rights.get(peer)
        return right is not None and not right.over

    def of(self, peer: NetAddr) -> Right:
        """Return a peer's right, made at the first call and after a loss. Raises what registering does."""
        with self._lock:
            over = [right for right in self._rights.values() if right.over]
        for right in over:
            self.revoke(right)
        with self._lock:
            found = self._rights.get(peer)
            if found is None:
                found = self._rights[peer] = Right(self._engine, self._memory, peer)
        return found

    def revoke(self, right: Right) -> None:
        """Take a right back, and forget it. Idempotent."""
        right.revoke()
        with self._lock:
            if self._rights.get(right.peer) is right:
                del self._rights[right.peer]

    def drop(self, peer: NetAddr) -> None:
        """Take a peer's right back, if it has one."""
        with self._lock:
            right = self._rights.get(peer)
        if right is not None:
            self.revoke(right)

    def close(self) -> None:
        """Take all back."""
        with self._lock:
            rights = list(self._rights.values())
        for right in rights:
            self.revoke(right)
