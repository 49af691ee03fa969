"""What comes in at a prefill rank: handshakes, requests, cancels; and how a decoder rank hears of an end.

All of it runs on the engine's callback thread, so that it does not depend on the thread that runs the model. A
prefiller that was closed listens until the last write of its requests has ended: nobody else can confirm a cancel.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from fabric_core import (
    BadRange,
    EngineClosed,
    FabricError,
    NetAddr,
    PeerLost,
    ProtocolError,
    TransferEngine,
    TransferError,
)
from fabric_core import Cancelled as CancelledError
from fabric_kvcache import hub
from fabric_kvcache.errors import PrefillRefused
from fabric_kvcache.match import LayoutMismatch
from fabric_kvcache.pairs import Rank, pair_plan, takers
from fabric_kvcache.pool import PagePool
from fabric_kvcache.protocol import (
    MAX_REASON,
    Ask,
    Cancel,
    Closed,
    Ended,
    Goodbye,
    Hello,
    Message,
    Unwelcome,
    Welcome,
)
from fabric_kvcache.request import Request
from fabric_kvcache.sessions import Session, objection
from fabric_kvcache.shard import Shard
from fabric_kvcache.tables import needed
from fabric_kvcache.target import How, Target

__all__ = ["Reception"]

log = logging.getLogger("fabric.kvcache")

_REPLY_TIMEOUT = 10.0  # seconds: how long an answer may take to be delivered
_TRIES = 3
_MOST_WITHDRAWN = 256

_Key = tuple[str, str]  #: the decode instance, and its id of a request


@dataclass(slots=True)
class _Waiting:
    """A request that some decoder ranks have asked for, and perhaps not yet all. Who gives up is not expected more."""

    expected: set[Rank]
    targets: dict[Rank, Target] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return self.targets.keys() >= self.expected


class Reception:
    """The half of a `Prefiller` that listens. It knows sessions, what is written to, and what waits for its turn."""

    def __init__(
        self, engine: TransferEngine, shard: Shard, pool: PagePool, tail_bytes: int, max_waiting: int, max_sessions: int
    ) -> None:
        self.engine = engine
        self.shard = shard
        self.pool = pool
        self.tail_bytes = tail_bytes
        self.max_waiting = max_waiting
        self.max_sessions = max_sessions
        self._changed = threading.Condition()  # guards what follows
        self._closed = False
        self._sessions: dict[int, Session] = {}
        self._targets: dict[tuple[int, int], Target] = {}  # by (session, epoch); until nothing is under way any more
        self._waiting: dict[_Key, _Waiting] = {}
        self._whole: OrderedDict[_Key, None] = OrderedDict()  # those of which all ranks have asked, in that order
        self._withdrawn: OrderedDict[str, None] = OrderedDict()
        self._hub = hub.join(engine, self._hear, serves=True)

    @property
    def malformed(self) -> int:
        """Messages to this engine that were none."""
        return self._hub.malformed

    @property
    def asked(self) -> frozenset[str]:
        """The ids of requests that wait to be taken: for an engine that looks, and does not wait."""
        with self._changed:
            return frozenset(request_id for _instance, request_id in self._whole)

    @property
    def withdrawn(self) -> frozenset[str]:
        """The ids of the latest requests that were given up before they were taken: nobody waits for those prompts."""
        with self._changed:
            return frozenset(self._withdrawn)

    # ---- messages (callback thread)

    def _hear(self, message: Message) -> bool:
        if self._closed and not self._confirms(message):
            return False
        if isinstance(message, Hello):
            self._greet(message)
        elif isinstance(message, Ask):
            self._ask(message)
        elif isinstance(message, Cancel):
            self._cancel(message)
        elif isinstance(message, Goodbye):
            return self._goodbye(message)
        else:
            return False
        return True

    def _confirms(self, message: Message) -> bool:
        """Whether a closed prefiller is still the one to answer: a cancel of what it has not ended."""
        with self._changed:
            return isinstance(message, Cancel) and (message.session, message.epoch) in self._targets

    def _greet(self, hello: Hello) -> None:
        try:
            address = NetAddr.from_bytes(hello.reply_to)
            reason = objection(hello, self.shard, self.tail_bytes)
            session = None if reason else Session(self.engine, hello, self._decoder_lost)
        except ProtocolError as error:
            self._hub.malformed += 1
            log.warning("a handshake was ignored: %s", error)
            return
        except FabricError as error:
            reason, session = f"the prefiller cannot keep a session: {error}", None
        if session is not None:
            with self._changed:
                old = [
                    one
                    for one in self._sessions.values()
                    if one.decoder == session.decoder or (one.place == session.place and one.address != session.address)
                ]
                if self._closed:
                    reason, old = "the prefiller has closed", []
                elif len(self._sessions) - len(old) >= self.max_sessions:
                    reason = f"the prefiller knows {self.max_sessions} decoders already"
                else:
                    self._sessions[session.id] = session
            for one in old:
                self._end_session(one, "the decoder has started anew")
        if reason is not None or session is None:
            log.warning("%s is not served: %s", address, reason)
            if session is not None:
                session.close()
            self._post(address, Unwelcome(hello.nonce, (reason or "")[:MAX_REASON]))
            return
        mine = self.shard
        self._post(
            address,
            Welcome(hello.nonce, session.id, self.engine.address.to_bytes(), mine.layout, mine.tp, mine.pp),
        )

    def _ask(self, part: Ask) -> None:
        with self._changed:
            session = self._sessions.get(part.session)
            waiting = len(self._waiting)
        try:
            reply_to = NetAddr.from_bytes(part.reply_to)
        except ProtocolError as error:
            self._hub.malformed += 1
            log.warning("a request was ignored: %s", error)
            return
        if session is None:
            self._refuse(reply_to, part, "the prefiller does not know this decoder any more: ask again", "forgotten")
            return
        try:
            assembly = session.take(part, self.max_waiting)
        except (ProtocolError, BadRange) as error:
            self._refuse(reply_to, part, str(error))
            return
        if assembly is None:
            return
        request = assembly.request()
        reason = session.wrong(assembly.head, request)
        for count, pool in zip(needed(self.shard.layout, request.total), self.shard.pool_pages, strict=True):
            if self.pool.own and count > pool:
                reason = f"the prompt needs {count} pages, the prefiller has {pool} in all"
        if reason is None and waiting >= self.max_waiting and _key(session, request) not in self._waiting:
            reason = f"{waiting} requests are waiting already"
        if reason is None:
            try:
                reason = self._arrived(session, assembly.head, request, assembly.deadline)
            except LayoutMismatch as error:
                reason = str(error)
        if reason is not None:
            self._refuse(reply_to, part, reason)

    def _arrived(self, session: Session, head: Ask, request: Request, deadline: float) -> str | None:
        """Take a request that is here as a whole; return why it is refused. Raises LayoutMismatch."""
        plan = pair_plan(self.shard, session.shard, request.seed)
        target = Target(session, head, request, plan, deadline)
        target.on_ended = self._ended
        rank = session.shard.tp, session.shard.pp
        key = _key(session, request)
        with self._changed:
            if self._closed:
                return "the prefiller has closed"
            group = self._waiting.get(key)
            former = group.targets.get(rank) if group is not None else None
            if former is not None and session is not former.session and session.place != former.session.place:
                return (
                    f"{former.session.address} asks for it too, as the same rank (TP {rank[0]} PP {rank[1]}): give "
                    "each decode instance a name, Decoder(instance=...), or each request an id of its own"
                )
            if group is None:
                wanted = takers(self.shard, session.shard.layout, request.seed, tail=session.tail_bytes > 0)
                group = self._waiting[key] = _Waiting(set(wanted))
            self._targets[session.id, request.epoch] = target
            session.targets += 1
            group.expected.add(rank)
            group.targets[rank] = target
            if group.whole:
                self._whole[key] = None
                self._changed.notify_all()
        if former is not None:
            self._stop(former, "cancelled", "the same decoder rank has asked again")
        return None

    def _cancel(self, message: Cancel) -> None:
        with self._changed:
            target = self._targets.get((message.session, message.epoch))
            session = self._sessions.get(message.session)
            if session is not None:
                session.cancelled(message.epoch)
        if target is not None:
            self._stop(target, "cancelled", "the decoder has cancelled it")
            return
        try:
            address = NetAddr.from_bytes(message.reply_to)
        except ProtocolError as error:
            self._hub.malformed += 1
            log.warning("a cancel was ignored: %s", error)
            return
        # Not here yet, or over: from now on nothing of it is written.
        self._post(address, Ended(message.session, message.epoch, "cancelled", "nothing of it is under way"))

    def _goodbye(self, message: Goodbye) -> bool:
        with self._changed:
            session = self._sessions.get(message.session)
        if session is None:
            return False
        self._end_session(session, "the decoder has closed", how="cancelled", sealed=False)
        return True

    def _decoder_lost(self, session: Session, error: FabricError) -> None:
        self._end_session(session, f"the decoder {session.address} is lost: {error}", error)

    def _end_session(
        self,
        session: Session,
        reason: str,
        error: FabricError | None = None,
        *,
        how: How = "failed",
        sealed: bool = True,
    ) -> None:
        """Forget a decoder, and stop its requests. `sealed`: those too of which only completions have not come yet."""
        with self._changed:
            self._sessions.pop(session.id, None)
            targets = [target for (number, _epoch), target in self._targets.items() if number == session.id]
        session.close()
        for target in targets:
            if sealed or not target.sealed:
                self._stop(target, how, reason, error)

    # ---- ends

    def _stop(self, target: Target, how: How, reason: str, error: FabricError | None = None) -> None:
        text = f"request {target.request.request_id}: {reason}"
        peer = str(target.session.address)
        if error is None:
            error = (CancelledError if how == "cancelled" else PrefillRefused)(text, peer=peer, op="prefill")
        target.stop(how, reason, error)

    def _ended(self, target: Target) -> None:
        request, session = target.request, target.session
        with self._changed:
            if self._targets.pop((session.id, request.epoch), None) is not None:
                session.targets -= 1
            key = _key(session, request)
            group = self._waiting.get(key)
            rank = session.shard.tp, session.shard.pp
            if group is not None and group.targets.get(rank) is target:
                del group.targets[rank]
                group.expected.discard(rank)  # the others need not wait for it; if all had asked, all still have
                if not group.targets:
                    del self._waiting[key]
                    self._whole.pop(key, None)
                    self._withdrawn[request.request_id] = None
                    if len(self._withdrawn) > _MOST_WITHDRAWN:
                        self._withdrawn.popitem(last=False)
            self._changed.notify_all()
        if target.stopped is not None:
            how, reason = target.stopped
            self._post(session.address, Ended(session.id, request.epoch, how, reason[:MAX_REASON]))
        if session.leaving:
            self._say_closed(session)
        if self._closed:
            self._stop_listening()

    def _refuse(self, decoder: NetAddr, part: Ask, reason: str, how: How = "refused") -> None:
        log.warning("request %s of %s is refused: %s", part.request_id, decoder, reason)
        with self._changed:
            session = self._sessions.get(part.session)
            if session is not None:
                session.cancelled(part.epoch)  # its other parts
        self._post(decoder, Ended(part.session, part.epoch, how, reason[:MAX_REASON]))

    def _post(self, to: NetAddr, message: Message, tries: int = _TRIES) -> None:
        """Answer. What was not delivered is tried again, unless the decoder is gone; it may hear it twice."""

        def sent(error: FabricError | None) -> None:
            gone = isinstance(error, PeerLost | CancelledError) and error.code != "ETIMEDOUT"
            if isinstance(error, TransferError) and not gone and tries > 1:
                self._post(to, message, tries - 1)
            elif error is not None and not isinstance(error, EngineClosed):
                log.warning("%s to %s was not delivered: %s", type(message).__name__, to, error)

        hub.post(self.engine, to, message, _REPLY_TIMEOUT, sent)

    def _leave(self) -> bool:
        """Take no more requests, refuse those that wait, tell every decoder; False if that was done before."""
        reason = "the prefiller has closed"
        with self._changed:
            closed, self._closed = self._closed, True
            sessions = list(self._sessions.values())
            for session in sessions:
                session.leaving = reason
            self._changed.notify_all()
        if closed:
            return False
        hub.vacate(self.engine)
        for session in sessions:
            self._end_session(session, reason)
            self._say_closed(session)
        self._stop_listening()
        return True

    def _say_closed(self, session: Session) -> None:
        """Tell a decoder that this prefiller has gone, once nothing of its session is under way."""
        with self._changed:
            reason = session.leaving if not session.targets else ""
            if reason:
                session.leaving = ""
        if reason:
            self._post(session.address, Closed(session.id, reason))

    def _stop_listening(self) -> None:
        with self._changed:
            if self._targets:
                return
        hub.leave(self.engine, self._hear)


def _key(session: Session, request: Request) -> _Key:
    return session.instance, request.request_id
