"""The control messages of an engine: one pool of receives, and who hears of what comes in.

An engine gives a message to whichever of its pools has a buffer. A process may have several decoders, and a prefiller,
on one engine (roles change at run time), so they share the pool, and each message goes to those whose kind it is.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from fabric_core import ConfigError, FabricError, NetAddr, ProtocolError, RecvPool, Transfer, TransferEngine
from fabric_kvcache.protocol import MAX_MESSAGE, Message, decode, encode

__all__ = ["Hub", "join", "leave", "post"]

log = logging.getLogger("fabric.kvcache")

_BUFFERS = 8

Listener = Callable[[Message], bool]  #: returns whether the message was for it


class Hub:
    """Of one engine."""

    def __init__(self, engine: TransferEngine) -> None:
        self.malformed = 0  #: messages that were none
        self.serves = False  #: whether a prefiller listens: a Hello names none, so there is one at most
        self._listeners: list[Listener] = []
        size = min(engine.max_message, MAX_MESSAGE)
        self._pool: RecvPool = engine.submit_recvs(size, _BUFFERS, self._on_message)

    def _on_message(self, data: bytes) -> None:
        try:
            message = decode(data)
        except ProtocolError as error:
            self.malformed += 1
            log.warning("a message was ignored: %s", error)
            return
        if not any(hear(message) for hear in tuple(self._listeners)):
            log.info("nobody here takes a message of kind %s", type(message).__name__)


_lock = threading.Lock()  # guards the one below, and who listens
_hubs: weakref.WeakKeyDictionary[TransferEngine, Hub] = weakref.WeakKeyDictionary()


def join(engine: TransferEngine, hear: Listener, *, serves: bool = False) -> Hub:
    """Have `hear` called (callback thread) with each message. Raises ConfigError for a second one that `serves`."""
    with _lock:
        hub = _hubs.get(engine)
        if hub is None:
            hub = _hubs[engine] = Hub(engine)
        if serves and hub.serves:
            raise ConfigError("this engine has a Prefiller already: one rank, one engine")
        hub.serves |= serves
        hub._listeners.append(hear)
    return hub


def leave(engine: TransferEngine, hear: Listener, *, serves: bool = False) -> None:
    """The last one ends the receives. Idempotent."""
    with _lock:
        hub = _hubs.get(engine)
        if hub is None or hear not in hub._listeners:
            return
        hub._listeners.remove(hear)
        hub.serves &= not serves
        if not hub._listeners:
            del _hubs[engine]
            hub._pool.close()


def post(
    engine: TransferEngine,
    to: NetAddr,
    message: Message,
    timeout: float,
    ended: Callable[[FabricError | None], Any],
) -> None:
    """Send; `ended(error or None)` is called once, in this thread or on the callback thread. Raises nothing itself."""

    def sent(transfer: Transfer) -> None:
        ended(transfer.exception())

    try:
        engine.submit_send(to, encode(message), sent, timeout=timeout)
    except FabricError as error:
        ended(error)
