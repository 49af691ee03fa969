"""One rank of a stream: its engine, its memory, and what ranks say to each other."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from fabric_core import ConfigError, Expectation, FabricError, MrDesc, MrHandle, NetAddr, TransferEngine
from fabric_core.config import Settings
from fabric_rlweights.memory import Span, fresh
from fabric_rlweights.stream.buckets import slot_bytes
from fabric_rlweights.stream.words import Card, Failed, Taken

__all__ = ["Member", "StreamFailed", "new_session"]

log = logging.getLogger("fabric.rlweights")
_BUFFERS, _WORD = 64, 4096
_LONGEST = 86400.0
_HEARTBEAT = 5.0  #: seconds; a process that trains or serves may not run for longer than fabric's one second allows


class StreamFailed(FabricError):
    """A stream ended before its last bucket. The text says who failed, and why."""


class Member:
    """Made once; `prepare`, `join`, one `send` or `receive`, `leave`; and again.

    Args:
        size: bytes of data of a bucket. slots: buckets of memory of each rank.
        device: where buckets are; "auto": the current GPU if there is one, else "cpu".
        backend: fabric's backend; None: FABRIC_BACKEND, or the best that works here.
        timeout: seconds without any progress until the stream fails, above 0 and at most a day.
    """

    def __init__(
        self, size: int, *, slots: int = 2, device: str = "auto", backend: str | None = None, timeout: float = 300.0
    ) -> None:
        if isinstance(slots, bool) or not isinstance(slots, int) or not 2 <= slots <= 64:
            raise ConfigError(f"slots={slots!r}: 2 to 64 buckets of memory")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST:
            raise ConfigError(f"timeout={timeout!r}: seconds, above 0 and at most {_LONGEST:g}")
        if isinstance(size, bool) or not isinstance(size, int) or not 1 << 10 <= size <= 1 << 40:
            raise ConfigError(f"size={size!r}: bytes of a bucket, 1024 to 2**40")
        self.size, self.slots, self.timeout = size, slots, float(timeout)
        self._device, self._backend = device, backend
        self._engine: TransferEngine | None = None
        self._spans: list[tuple[Span, MrHandle]] = []
        self.imms: list[int] = []
        self.changed = threading.Condition()
        self.role: Literal["sender", "receiver", ""] = ""
        self.session, self.rank = 0, -1
        self.senders: list[Card] = []
        self.receivers: list[Card] = []
        self.taken: list[int] = []  #: of each receiver, the last bucket that it has used
        self.problem = ""
        self.stop: Callable[[], None] | None = None  #: ends the writes of a stream that is being sent
        self._told = False  # all others know of the problem
        self._waiting: Expectation | None = None

    # ---- a session

    @property
    def engine(self) -> TransferEngine:
        """The engine, opened when it is needed first."""
        if self._engine is None:
            device = self._device
            if device == "auto":
                import torch

                device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
            self._device = device
            self._engine = TransferEngine.open(device, settings=_patient(self._backend))
            self._engine.submit_recvs(_WORD, _BUFFERS, self._on_word)
            self._engine.on_peer_lost = self._on_lost
        return self._engine

    def prepare(self) -> Card:
        """Allocate and register memory; return this rank's card. What was there is given back first."""
        self.leave()
        engine = self.engine
        span = fresh(engine, slot_bytes(self.size) * self.slots, self._device)
        handle, desc = engine.reg_mr(span.owner)
        self._spans = [(span, handle)]
        self.imms = [engine.alloc_imm() for _ in range(self.slots)]
        return Card(str(engine.address), desc.to_bytes(), list(self.imms), self.size)

    def join(
        self, session: int, role: Literal["sender", "receiver"], rank: int, senders: list[Card], receivers: list[Card]
    ) -> None:
        """Take part in a session. Raises ConfigError: not prepared, or others have buckets of another size."""
        if not self._spans:
            raise ConfigError("join() needs the memory of prepare(): call that first")
        for kind, cards in (("sender", senders), ("receiver", receivers)):
            for number, card in enumerate(cards):
                if card.size != self.size or len(card.imms) != self.slots:
                    raise ConfigError(
                        f"{kind} {number} has {len(card.imms)} buckets of {card.size} bytes, {role} {rank} has "
                        f"{self.slots} of {self.size}: give all ranks the same"
                    )
        with self.changed:
            self.session, self.role, self.rank = session, role, rank
            self.senders, self.receivers = list(senders), list(receivers)
            self.taken = [-1] * len(receivers)
            self.problem, self._told = "", False

    def leave(self) -> None:
        """Give the memory back, so that nobody can write there any more; a stream that still runs ends. Idempotent."""
        with self.changed:
            self.session = 0
            self._wake()
        if (stop := self.stop) is not None:  # or memory that is read from would be waited for
            stop()
        spans, self._spans = self._spans, []
        for _, handle in spans:
            handle.close()
        for imm in self.imms:
            self.engine.free_imm(imm)
        self.imms = []

    def close(self) -> None:
        """Leave, and close the engine. Idempotent."""
        engine = self._engine
        if engine is not None and not engine.closed:
            self.leave()
            engine.close()
        self._engine = None

    # ---- for sending and receiving

    def slot(self, number: int) -> Any:
        """Return a slot's memory, a tensor of uint8."""
        import torch

        octets, size = self._spans[0][0].bytes(), slot_bytes(self.size)
        whole = octets if isinstance(octets, torch.Tensor) else torch.from_numpy(octets)
        return whole[number * size : (number + 1) * size]

    @property
    def handle(self) -> MrHandle:
        """The memory as a source."""
        return self._spans[0][1]

    def targets(self) -> list[MrDesc]:
        """Return the descriptors of all receivers."""
        return [MrDesc.from_bytes(card.desc) for card in self.receivers]

    def owner(self, bucket: int) -> Card:
        """Return the sender of a bucket."""
        return self.senders[bucket % len(self.senders)]

    def say(self, card: Card, word: Taken | Failed) -> None:
        """Tell one rank something. What does not arrive is logged: its receiver has a deadline of its own."""
        try:
            self.engine.submit_send(NetAddr.parse(card.address), msgspec.msgpack.encode(word), timeout=self.timeout)
        except FabricError as error:
            log.warning("%s %d: %s", self.role, self.rank, error)

    def fail(self, session: int, reason: str) -> None:
        """End a session here, and tell all others, unless one of them has told all, or it was left."""
        with self.changed:
            if self._told or not session or session != self.session:
                return
            self._told = True
            self._end(f"{self.role} {self.rank}: {reason}")
            word = Failed(self.session, self.problem[:2000])
            others = [card for card in (*self.senders, *self.receivers) if card.address != str(self.engine.address)]
        for card in others:
            self.say(card, word)

    def begin(self) -> int:
        """Return the session's number, for a stream to go by. Raises ConfigError: none was joined."""
        if not self.session:
            raise ConfigError("not in a session: prepare() and join() come before a stream")
        return self.session

    def check(self, session: int) -> None:
        """Raise StreamFailed if a session is over for a reason, or was left."""
        if session != self.session:
            raise StreamFailed(f"{self.role} {self.rank}: it was left, or prepared anew, before its stream had ended")
        if self.problem:
            raise StreamFailed(self.problem)

    def wait_for(self, expectation: Expectation) -> None:
        """Remember what is to be cancelled when somebody fails."""
        with self.changed:
            self._waiting = expectation
            if self.problem:
                expectation.cancel()

    def waited(self, expectation: Expectation) -> None:
        """It has ended."""
        with self.changed:
            if self._waiting is expectation:
                self._waiting = None

    def _end(self, reason: str) -> None:
        """Under the lock."""
        self.problem = self.problem or reason
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self.changed.notify_all()

    # ---- what is heard

    def _on_word(self, data: bytes) -> None:
        try:
            word = msgspec.msgpack.decode(data, type=Taken | Failed)
        except msgspec.DecodeError as error:
            log.warning("a word was thrown away: %s", error)
            return
        with self.changed:
            if word.session != self.session:
                return
            if isinstance(word, Failed):
                self._told = True
                self._end(word.reason)
            elif 0 <= word.receiver < len(self.taken):
                self.taken[word.receiver] = max(self.taken[word.receiver], word.bucket)
                self.changed.notify_all()

    def _on_lost(self, error: Any) -> None:
        lost = str(getattr(error, "peer", "")).partition("#")[0]
        with self.changed:
            for kind, cards in (("sender", self.senders), ("receiver", self.receivers)):
                for number, card in enumerate(cards):
                    if self.session and card.address.partition("#")[0] == lost:
                        self._end(f"{kind} {number} is gone: {error}")


def new_session() -> int:
    """Return a number that no earlier session had."""
    return secrets.randbits(62) + 1


def _patient(backend: str | None) -> Settings:
    found = Settings.load(backend=backend)
    return found.replace(heartbeat=_HEARTBEAT) if found.sources()["heartbeat"] == "default" else found
