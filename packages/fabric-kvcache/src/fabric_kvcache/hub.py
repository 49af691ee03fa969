"""The control messages of an engine: one pool of receives, and who hears of what comes in.

An engine gives a message to whichever of its pools has a buffer. A process may have several decoders, and a prefiller,
on one engine (roles change at run time), so they share the pool, and each message goes to those whose kind it is. What
nobody takes is answered, so that its sender need not wait for its own deadline.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from fabric_core import ConfigError, FabricError, NetAddr, ProtocolError, RecvPool, Transfer, TransferEngine
from fabric_kvcache.protocol import (
    MAX_MESSAGE,
    MAX_REASON,
    Ask,
    Cancel,
    Ended,
    Goodbye,
    Hello,
    Message,
    Unwelcome,
    Welcome,
    decode,
    encode,
    greeting_of_another_version,
    unwelcome_in_version,
)

__all__ = ["Hub", "check_vacant", "join", "leave", "post", "vacate"]

log = logging.getLogger("fabric.kvcache")

_BUFFERS = 8
_ANSWER_TIMEOUT = 10.0  # seconds

Listener = Callable[[Message], bool]  #: returns whether the message was for it


class Hub:
    """Of one engine."""

    def __init__(self, engine: TransferEngine) -> None:
        self.malformed = 0  #: messages that were none
        self.serves = False  #: whether a prefiller listens: a Hello names none, so there is one at most
        self._engine = engine
        self._listeners: list[Listener] = []
        size = min(engine.max_message, MAX_MESSAGE)
        self._pool: RecvPool = engine.submit_recvs(size, _BUFFERS, self._on_message)

    def _on_message(self, data: bytes) -> None:
        try:
            message = decode(data)
        except ProtocolError as error:
            self.malformed += 1
            log.warning("a message was ignored: %s", error)
            self._answer_other_version(data)
            return
        if not any(hear(message) for hear in tuple(self._listeners)):
            self._answer(message)

    def _answer(self, message: Message) -> None:
        """Nobody here takes it: say so to whoever would wait for an answer."""
        answer: Message
        match message:
            case Hello(nonce=nonce, reply_to=to):
                reason = f"there is no prefiller at {self._engine.address}, or not any more"
                answer = Unwelcome(nonce, reason[:MAX_REASON])
            case Ask(session=session, epoch=epoch, reply_to=to):
                # Not "forgotten": to greet again would find nobody either.
                answer = Ended(session, epoch, "refused", "there is no prefiller here any more")
            case Cancel(session=session, epoch=epoch, reply_to=to):
                # A prefiller that has closed listens until every write of its own has ended: see reception.py.
                answer = Ended(session, epoch, "cancelled", "nothing of it is under way")
            case Welcome(session=session, address=to):
                answer = Goodbye(session)  # the decoder was closed before it was welcome
            case _:
                log.info("nobody here takes a message of kind %s", type(message).__name__)
                return
        try:
            address = NetAddr.from_bytes(to)
        except ProtocolError as error:
            self.malformed += 1
            log.warning("a message was ignored: %s", error)
            return
        post(self._engine, address, answer, _ANSWER_TIMEOUT, _unanswered)

    def _answer_other_version(self, data: bytes) -> None:
        greeting = greeting_of_another_version(data)
        if greeting is None or not self.serves:
            return
        version, nonce, reply_to = greeting
        try:
            address = NetAddr.from_bytes(reply_to)
        except ProtocolError:
            return
        _send(self._engine, address, unwelcome_in_version(version, nonce), _ANSWER_TIMEOUT, _unanswered)


_lock = threading.Lock()  # guards the one below, and who listens
# A hub refers to its engine, so to hold it here would keep both for ever: those who have joined hold it.
_hubs: weakref.WeakKeyDictionary[TransferEngine, weakref.ref[Hub]] = weakref.WeakKeyDictionary()


def _hub_of(engine: TransferEngine) -> Hub | None:
    """[_lock]"""
    held = _hubs.get(engine)
    return None if held is None else held()


def check_vacant(engine: TransferEngine) -> None:
    """Raise ConfigError if the engine has a prefiller: before memory is allocated for another one."""
    with _lock:
        hub = _hub_of(engine)
        if hub is not None and hub.serves:
            raise ConfigError("this engine has a Prefiller already: one rank, one engine")


def join(engine: TransferEngine, hear: Listener, *, serves: bool = False) -> Hub:
    """Have `hear` called (callback thread) with each message, as long as the result is held and until `leave`.

    Raises ConfigError for a second one that `serves`.
    """
    with _lock:
        hub = _hub_of(engine)
        if hub is None:
            hub = Hub(engine)
            _hubs[engine] = weakref.ref(hub)
        if serves and hub.serves:
            raise ConfigError("this engine has a Prefiller already: one rank, one engine")
        hub.serves |= serves
        hub._listeners.append(hear)
    return hub


def vacate(engine: TransferEngine) -> None:
    """The one that serves does so no more, and another one may; it goes on listening until it leaves."""
    with _lock:
        hub = _hub_of(engine)
        if hub is not None:
            hub.serves = False


def leave(engine: TransferEngine, hear: Listener) -> None:
    """The last one ends the receives. Idempotent."""
    with _lock:
        hub = _hub_of(engine)
        if hub is None or hear not in hub._listeners:
            return
        hub._listeners.remove(hear)
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
    try:
        data = encode(message)
    except FabricError as error:
        ended(error)
        return
    _send(engine, to, data, timeout, ended)


def _send(
    engine: TransferEngine, to: NetAddr, data: bytes, timeout: float, ended: Callable[[FabricError | None], Any]
) -> None:
    def sent(transfer: Transfer) -> None:
        ended(transfer.exception())

    try:
        engine.submit_send(to, data, sent, timeout=timeout)
    except FabricError as error:
        ended(error)


def _unanswered(error: FabricError | None) -> None:
    if error is not None:
        log.info("an answer was not delivered: %s", error)
