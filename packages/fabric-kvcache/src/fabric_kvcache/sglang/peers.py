"""Where the memory of peers is registered: asked once of each, and again when it was lost or has other memory."""

from __future__ import annotations

import logging
import secrets
import threading
from dataclasses import dataclass, field

import msgspec

from fabric_core import BadRange, EngineClosed, FabricError, MrDesc, NetAddr, PeerLost, TransferEngine
from fabric_kvcache.sglang.regions import Regions, Table, Where
from fabric_kvcache.watch import PeerWatch

__all__ = ["Peers"]

log = logging.getLogger("fabric.kvcache.sglang")


@dataclass(slots=True)
class _Question:
    session: str
    heard: threading.Event = field(default_factory=threading.Event)
    parts: dict[int, list[bytes]] = field(default_factory=dict)
    error: FabricError | None = None


class Peers:
    """The tables of one engine's peers, by the names of their sessions. `timeout`: seconds of a question."""

    def __init__(self, engine: TransferEngine, timeout: float) -> None:
        self._engine, self._timeout = engine, timeout
        self._lock = threading.Lock()
        self._closed = False
        self._tables: dict[str, Table] = {}
        self._watches: dict[str, PeerWatch] = {}
        self._questions: dict[int, _Question] = {}

    def known(self, session: str) -> Table | None:
        """Return what a peer has told, None: nothing since it was lost."""
        with self._lock:
            return self._tables.get(session)

    def ask(self, session: str) -> Table:
        """Return a peer's regions. Raises PeerLost: no answer; EngineClosed; ProtocolError: the name is no address."""
        number, question, peer = secrets.randbits(62), _Question(session), NetAddr.parse(session.rpartition(":")[0])
        with self._lock:
            if self._closed:
                raise EngineClosed("these sessions are closed: nobody can be asked any more")
            self._questions[number] = question
        try:
            self._watch(session, peer)
            word = msgspec.msgpack.encode(Where(str(self._engine.address), number))
            self._engine.submit_send(peer, word, timeout=self._timeout).wait(self._timeout + 5.0)
            if not question.heard.wait(self._timeout):
                text = f"it did not say within {self._timeout:g} s where its memory is"
                raise PeerLost(text, peer=session, op="write", code="ETIMEDOUT")
        finally:
            with self._lock:
                del self._questions[number]
        if question.error is not None:
            raise question.error
        descs = [MrDesc.from_bytes(blob) for part in sorted(question.parts) for blob in question.parts[part]]
        if any(desc.addr != peer for desc in descs):
            raise BadRange(f"{session} told of memory that is another engine's")
        table = Table([(desc.ptr, desc.nbytes, desc) for desc in descs])
        with self._lock:
            if session in self._watches:  # else it was lost meanwhile
                self._tables[session] = table
        return table

    def heard(self, word: Regions) -> None:
        """Take part of an answer."""
        with self._lock:
            question = self._questions.get(word.number)
            if question is not None and 0 <= word.part < word.parts:
                question.parts[word.part] = word.descs
                if len(question.parts) == word.parts:
                    question.heard.set()

    def close(self) -> None:
        """Have all questions end. Idempotent."""
        with self._lock:
            self._closed = True
            watches = list(self._watches.values())
            self._watches.clear()
            self._tables.clear()
            for question in self._questions.values():
                question.error = EngineClosed("these sessions were closed while a peer was asked")
                question.heard.set()
        for watch in watches:
            watch.close()

    def _watch(self, session: str, peer: NetAddr) -> None:
        """Hear of the loss of a peer: of this incarnation of it, whatever becomes of others at its place."""
        with self._lock:
            if self._closed or session in self._watches:
                return
        watch = PeerWatch(self._engine, peer, lambda error: self._lost(session, error))
        with self._lock:
            kept = not self._closed and watch.open and self._watches.setdefault(session, watch) is watch
        if not kept:
            watch.close()

    def _lost(self, session: str, error: FabricError) -> None:
        with self._lock:
            self._watches.pop(session, None)
            self._tables.pop(session, None)
            for question in self._questions.values():
                if question.session == session:
                    question.error = error
                    question.heard.set()
