"""The prefill ranks that a decoder rank knows: the handshake with each, its right to write here, and its loss.

Each prefill rank writes under registrations of its own. When it is lost, or does not confirm a cancel, they are
revoked: nobody else notices, and from then on its writes are refused. That alone makes pages safe again where the NIC
checks keys. The `local` backend copies by the peer's own CPU, so a process that was stopped in the middle of a copy
ends it when it goes on; there, pages of a rank that stopped answering stay in quarantine until it has taken a message
after the revocation, has answered, or is known to be gone.

A rank that has closed, or does not know this decoder any more, is not lost: it says what becomes of each request.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from fabric_core import (
    Cancelled,
    DeadlineExceeded,
    EngineClosed,
    FabricError,
    MrHandle,
    NetAddr,
    PeerLost,
    StaleHandle,
    TransferError,
)
from fabric_kvcache.errors import PrefillRefused
from fabric_kvcache.hub import post
from fabric_kvcache.protocol import Cancel, Closed, Ended, Goodbye, Hello, Message, Unwelcome, Welcome
from fabric_kvcache.shard import Shard
from fabric_kvcache.watch import PeerWatch

if TYPE_CHECKING:
    from fabric_kvcache.decoder import Decoder
    from fabric_kvcache.pending import PendingKv

__all__ = ["PrefillRank", "Ranks"]

log = logging.getLogger("fabric.kvcache")

_REVOKED_IS_SAFE = frozenset({"ibverbs"})  # backends whose NIC looks at the key of each write as it lands
_GONE = frozenset({"ECONNRESET", "ECONNREFUSED", "ESTALE"})  # with its right revoked: its process ended, or closed
_FIRST_PROBE, _LAST_PROBE = 0.5, 15.0  # seconds between questions to a rank that was lost without being gone
_MESSAGE_TIMEOUT = 10.0  # seconds
_AFTERWARDS = 1.0  # seconds: how long what a rank wrote before it said that it has closed may take to be seen
_CLOSED = "the decoder is closed: it asks for nothing any more"


class PrefillRank:
    """One prefill rank, as one decoder knows it. `open`: the requests that may still be written by it, by epoch."""

    def __init__(self, given: NetAddr, handles: tuple[MrHandle, MrHandle], nonce: int) -> None:
        self.given = given
        self.nonce = nonce
        self.handles = handles  #: of pages and slots; its right to write
        self.address = given  #: with the incarnation, once it has answered
        self.session = -1
        self.shard: Shard | None = None
        self.error: FabricError | None = None  #: why it cannot be asked any more
        self.ended = False  #: its right to write is being revoked, or is
        self.watch: PeerWatch | None = None
        self.open: dict[int, PendingKv] = {}
        self.revoking = threading.Lock()  # held while the handles are closed: a second thread waits for the first
        self.revoked = False
        self.waiting: list[Callable[[], object]] = []  #: called when the handshake has ended

    @property
    def greeting(self) -> bool:
        return self.shard is None and self.error is None


class Ranks:
    """Any thread."""

    def __init__(self, decoder: Decoder) -> None:
        self._d = decoder
        self._id = secrets.randbits(62)
        self._lock = threading.Lock()  # guards the five below, and what is in the ranks
        self._closed = False
        self._known: dict[NetAddr, PrefillRank] = {}
        self._greeting: dict[int, PrefillRank] = {}
        self._sessions: dict[int, PrefillRank] = {}  # of lost ones too, while something of them is open
        self._writers: set[PrefillRank] = set()  # whose right to write was not revoked yet

    # ---- handshake

    def get(self, address: NetAddr) -> PrefillRank:
        """Return what is known of a rank; a rank that is not known is greeted. Raises StaleHandle after `close`."""
        with self._lock:
            self._check()
            rank = self._known.get(address)
        if rank is not None:
            return rank
        d = self._d
        page_handle, desc = d.pool.register()
        slot_handle, slots = d.slots.register()
        rank = PrefillRank(address, (page_handle, slot_handle), secrets.randbits(62))
        with self._lock:
            closed = self._closed
            other = rank if closed else self._known.setdefault(address, rank)
            if other is rank and not closed:
                self._greeting[rank.nonce] = rank
                self._writers.add(rank)
        if closed:
            self._close_handles(rank)
            raise StaleHandle(_CLOSED)
        if other is not rank:
            self._close_handles(rank)
            return other
        hello = Hello(
            nonce=rank.nonce,
            decoder=self._id,
            reply_to=d.engine.address.to_bytes(),
            layout=d.shard.layout,
            tp=d.shard.tp,
            pp=d.shard.pp,
            pages=d.shard.pool_pages,
            bases=d.shard.bases,
            desc=desc.to_bytes(),
            slots=slots.to_bytes(),
            tail_bytes=d.tail_bytes,
            instance=d.instance,
        )
        post(d.engine, address, hello, _MESSAGE_TIMEOUT, lambda error: self._unreached(rank, error))
        return rank

    def _check(self) -> None:
        if self._closed:
            raise StaleHandle(_CLOSED)

    def _unreached(self, rank: PrefillRank, error: FabricError | None) -> None:
        if error is not None:
            self.lost(rank, error)

    def when_ready(self, rank: PrefillRank, ready: Callable[[], object]) -> None:
        """Call `ready()` when the handshake has ended, well or not; at once if it has."""
        with self._lock:
            if rank.greeting:
                rank.waiting.append(ready)
                return
        ready()

    def hear(self, message: Message) -> bool:
        """Take an answer of a prefiller (callback thread); False: it is not for this decoder."""
        if isinstance(message, Ended):
            return self._ended(message)
        if isinstance(message, Closed):
            return self._has_closed(message)
        if not isinstance(message, Welcome | Unwelcome):
            return False
        with self._lock:
            rank = self._greeting.pop(message.nonce, None)
        if rank is None:
            return False
        if isinstance(message, Unwelcome):
            self.lost(rank, PrefillRefused(message.reason, peer=str(rank.given), op="handshake"))
            return True
        try:
            address = NetAddr.from_bytes(message.address)
            shard = Shard(message.layout, tp=message.tp, pp=message.pp)
            watch = PeerWatch(self._d.engine, address, lambda error: self.lost(rank, error))
        except FabricError as error:
            self.lost(rank, error)
            return True
        with self._lock:
            if rank.error is not None:  # lost while it answered
                ready: list[Callable[[], object]] = []
            else:
                rank.address, rank.session, rank.shard, rank.watch = address, message.session, shard, watch
                self._sessions[rank.session] = rank
                ready, rank.waiting = rank.waiting, []
                watch = None  # type: ignore[assignment]
        if watch is not None:
            watch.close()
        for call in ready:
            call()
        return True

    # ---- requests

    def opened(self, rank: PrefillRank, epoch: int, pending: PendingKv) -> FabricError | None:
        """Note that a rank is about to be allowed to write for a request; returns why it cannot be."""
        with self._lock:
            if rank.error is None:
                rank.open[epoch] = pending
            return rank.error

    def closed(self, rank: PrefillRank, epoch: int) -> None:
        """Note that a rank has nothing to write any more for a request."""
        with self._lock:
            rank.open.pop(epoch, None)
            self._tidy(rank)

    def _tidy(self, rank: PrefillRank) -> None:
        """Forget a rank that cannot be asked any more, once nothing is open with it. With the lock held."""
        if rank.error is None or rank.open:
            return
        self._sessions.pop(rank.session, None)
        if not rank.ended:
            rank.ended = True
            self._d.clock.call(0, lambda: self._dismiss(rank))

    def _dismiss(self, rank: PrefillRank) -> None:
        if rank.watch is not None:
            rank.watch.close()
        self._close_handles(rank)

    def _retire(self, rank: PrefillRank, error: FabricError) -> None:
        """Ask a rank nothing more. What is open with it goes on; the next request greets it anew."""
        with self._lock:
            rank.error = rank.error or error
            if self._known.get(rank.given) is rank:
                del self._known[rank.given]
            self._tidy(rank)

    def _has_closed(self, message: Closed) -> bool:
        with self._lock:
            rank = self._sessions.get(message.session)
        if rank is None:
            return False
        error = PrefillRefused(message.reason, peer=str(rank.address), op="prefill")
        self._retire(rank, error)
        self._d.clock.call(_AFTERWARDS, lambda: self._over(rank, error))
        return True

    def _over(self, rank: PrefillRank, error: FabricError) -> None:
        """Nothing is written by a rank any more, and it has had its time to be seen."""
        with self._lock:
            if rank.ended:
                return
            rank.ended = True
        self._dismiss(rank)
        self._all_ended(rank, error)

    def _ended(self, message: Ended) -> bool:
        with self._lock:
            rank = self._sessions.get(message.session)
            if rank is None:
                return False
            pending = rank.open.pop(message.epoch, None)
            self._tidy(rank)
        if message.how == "forgotten":
            self._retire(rank, PrefillRefused(message.reason, peer=str(rank.address), op="handshake"))
        if pending is None:
            log.info("the end of request epoch %d at %s came after its end here", message.epoch, rank.address)
        elif message.how != "forgotten" or not pending._greet_again(rank):
            pending._ended_at(rank, message)
        return True

    def greeting_ends(self, rank: PrefillRank, seconds: float) -> None:
        """Give up a handshake that is not answered in time; the next request greets the rank anew."""

        def overdue() -> None:
            if rank.greeting:
                self.lost(rank, DeadlineExceeded("no answer to the handshake", code="ETIME"))

        self._d.clock.call(seconds, overdue)

    def cancel(self, rank: PrefillRank, epoch: int) -> None:
        """Ask a rank to stop; if it does not confirm in time it is treated as lost."""
        with self._lock:
            if rank.ended or epoch not in rank.open:
                return  # its right to write is being revoked
        d = self._d
        message = Cancel(rank.session, epoch, d.engine.address.to_bytes())

        def sent(error: FabricError | None) -> None:
            if isinstance(error, PeerLost):
                self.lost(rank, error)

        def overdue() -> None:
            with self._lock:
                still = epoch in rank.open
            if still:
                self.lost(
                    rank,
                    TransferError(
                        f"it has not confirmed the end of a request within {d.confirm_timeout:g} s",
                        peer=str(rank.address),
                        op="cancel",
                        cure="its right to write is revoked; look into its log, and at what blocks its callbacks",
                    ),
                )

        post(d.engine, rank.address, message, d.confirm_timeout, sent)
        d.clock.call(d.confirm_timeout, overdue)

    # ---- loss

    def lost(self, rank: PrefillRank, error: FabricError) -> None:
        """End a rank: what is open with it fails, its right to write is revoked. The next request greets it anew."""
        with self._lock:
            if rank.ended:
                return
            rank.ended = True
            rank.error = rank.error or error
            self._greeting.pop(rank.nonce, None)
            if self._known.get(rank.given) is rank:
                del self._known[rank.given]
            ready, rank.waiting = rank.waiting, []
            failed = list(rank.open.values())
            self._tidy(rank)
            watch = rank.watch
        if watch is not None:
            watch.close()
        # Not here: to deregister waits for copies under way, and this may be the callback thread.
        self._d.clock.call(0, lambda: self._revoke(rank, error))
        for pending in failed:
            pending._lost(error)
        for call in ready:
            call()

    def _revoke(self, rank: PrefillRank, error: FabricError) -> None:
        self._close_handles(rank)
        if self._d.engine.backend in _REVOKED_IS_SAFE or _is_gone(error):
            self._all_ended(rank)
        else:
            self._probe(rank, _FIRST_PROBE)

    def _close_handles(self, rank: PrefillRank) -> None:
        with self._lock:
            self._writers.discard(rank)
        with rank.revoking:
            revoked = True
            for handle in rank.handles:
                try:
                    handle.close(5.0)
                except FabricError as error:  # only a target: nothing of ours can hold it
                    log.error("the right of %s to write could not be revoked: %s", rank.given, error)
                    revoked = False
            rank.revoked = revoked

    def _all_ended(self, rank: PrefillRank, error: FabricError | None = None) -> None:
        with self._lock:
            ended = list(rank.open.values()) if rank.revoked else []
            rank.open.clear()
            self._tidy(rank)
        for pending in ended:
            pending._ended_at(rank, None, error)

    def _probe(self, rank: PrefillRank, pause: float) -> None:
        """Ask a lost rank until it takes a message, or is gone: then no copy of it is under way any more."""
        with self._lock:
            epoch = next(iter(rank.open), None)
        if epoch is None:
            return

        def sent(error: FabricError | None) -> None:
            if error is None or _is_gone(error):
                self._d.clock.call(0, lambda: self._all_ended(rank))
            elif isinstance(error, EngineClosed):  # of this side: nobody can be asked any more
                self._d.clock.call(0, self._d._stop_asking)
            else:
                self._d.clock.call(pause, lambda: self._probe(rank, min(2 * pause, _LAST_PROBE)))

        message = Cancel(rank.session, epoch, self._d.engine.address.to_bytes())
        post(self._d.engine, rank.address, message, _MESSAGE_TIMEOUT, sent)

    def close(self) -> None:
        """Greet nobody any more, take leave of everybody, and revoke every right to write.

        Ranks that may still be in the middle of a copy are asked on: see `Decoder.close`.
        """
        with self._lock:
            self._closed = True
            every = list(self._writers)
        for rank in every:
            if rank.session >= 0:
                post(self._d.engine, rank.address, Goodbye(rank.session), _MESSAGE_TIMEOUT, lambda _: None)
            self.lost(rank, Cancelled("the decoder was closed", code="ECANCELED"))
            self._close_handles(rank)


def _is_gone(error: FabricError) -> bool:
    return isinstance(error, PeerLost) and error.code in _GONE
