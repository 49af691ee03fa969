"""Writes to raw addresses of a peer, as SGLang's connectors give them: where its memory is registered is asked once.

A session's name is the address of an engine. A block is (our address, its address, bytes); blocks of one length between
two regions are one operation. Knows no SGLang.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from fabric_core import (
    BadRange,
    ConfigError,
    FabricError,
    MrDesc,
    MrHandle,
    NetAddr,
    Pages,
    RemoteAccessError,
    Transfer,
    TransferEngine,
)
from fabric_kvcache.sglang.peers import Peers
from fabric_kvcache.sglang.regions import Ints, Regions, Table, Where

__all__ = ["Sessions"]

log = logging.getLogger("fabric.kvcache.sglang")
_BUFFERS = 64
_LONGEST = 86400.0


class Sessions:
    """One engine as SGLang uses a transfer engine. Safe to use from any number of threads.

    Args:
        device_of: tells of an address that is to be registered which device it is on. timeout: seconds of a call.
    """

    def __init__(
        self, engine: TransferEngine, *, timeout: float = 30.0, device_of: Callable[[int], str] = lambda _: "cpu"
    ) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST:
            raise ConfigError(f"timeout={timeout!r}: seconds, above 0 and at most {_LONGEST:g}")
        self.engine, self.timeout = engine, float(timeout)
        self._device_of = device_of
        self._lock = threading.Lock()
        self._ours: dict[int, tuple[MrHandle, bytes]] = {}
        self._table = Table([])
        self._peers = Peers(engine, self.timeout)
        self._size = min(engine.max_message, 1 << 16)
        self._pool = engine.submit_recvs(self._size, _BUFFERS, self._on_word)

    # ---- the dialect

    def get_session_id(self) -> str:
        """Return the name that peers write to: our address, and a number by which SGLang spreads peers over queues."""
        address = str(self.engine.address)
        return f"{address}:{zlib.crc32(address.encode()) % 65536}"

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int:
        """Register memory. Returns 0; raises what `reg_mr` does, instead of a number that nobody looks at."""
        for ptr, length in zip(map(int, ptrs), map(int, lengths), strict=True):
            known = self._ours.get(ptr)
            if not length or (known is not None and known[0].nbytes >= length):
                continue
            handle, desc = self.engine.reg_mr((ptr, length, self._device_of(ptr)))
            with self._lock:
                self._ours[ptr] = (handle, desc.to_bytes())
            if known is not None:
                known[0].close()
        self._rebuild()
        return 0

    def batch_deregister(self, ptrs: Sequence[int]) -> int:
        """Deregister memory: nobody can write there any more. Addresses that are not known are fine. Returns 0."""
        with self._lock:
            gone = [self._ours.pop(int(ptr)) for ptr in ptrs if int(ptr) in self._ours]
        self._rebuild()
        for handle, _ in gone:
            handle.close()
        return 0

    def batch_transfer_sync(
        self, session_id: str, buffers: Sequence[int], peer_addresses: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Write blocks, and wait. Returns 0: all are there; -1: not, and nothing of it is written any more."""
        return _number(lambda: self.write(session_id, buffers, peer_addresses, lengths))

    def transfer_sync(self, session_id: str, buffer: int, peer_address: int, length: int) -> int:
        """One block: see batch_transfer_sync."""
        return self.batch_transfer_sync(session_id, [buffer], [peer_address], [length])

    def send_probe(self, session_id: str) -> int:
        """Return 0 if the peer answers, else -1."""
        return _number(lambda: self._peers.ask(session_id))

    def close(self) -> None:
        """Deregister everything, and close the engine. Idempotent."""
        self._peers.close()
        if not self.engine.closed:
            self._pool.close()
            self.batch_deregister(list(self._ours))
            self.engine.close()

    # ---- writing

    def write(self, session_id: str, buffers: Any, peer_addresses: Any, lengths: Any) -> None:
        """As batch_transfer_sync. Raises BadRange: not registered; what transfers raise, once all have ended."""
        here, there, sizes = (np.asarray(list(x), np.int64) for x in (buffers, peer_addresses, lengths))
        if not len(here) == len(there) == len(sizes):
            raise BadRange(f"{len(here)} sources, {len(there)} targets, {len(sizes)} lengths: give as many of each")
        some = sizes != 0
        here, there, sizes = here[some], there[some], sizes[some]
        if not len(here):
            return
        with self._lock:
            table = self._table
        peer = self._peers.known(session_id)
        ours = table.find(here, sizes)
        self._must_be_known(ours, here, sizes, "our memory")
        if peer is not None and not (peer.find(there, sizes) < 0).any():
            try:
                self._move(table, ours, here, peer, there, sizes)
                return
            except RemoteAccessError:
                pass  # what we know of it is old: it has registered its memory anew
        peer = self._peers.ask(session_id)
        self._must_be_known(peer.find(there, sizes), there, sizes, f"memory of {session_id}")
        self._move(table, ours, here, peer, there, sizes)

    def _move(self, table: Table, ours: Ints, here: Ints, peer: Table, there: Ints, sizes: Ints) -> None:
        transfers: list[Transfer] = []
        try:
            kinds = np.stack([ours, peer.find(there, sizes), sizes], 1)
            groups, which = np.unique(kinds, axis=0, return_inverse=True)
            for number, (our, their, size) in enumerate(groups.tolist()):
                members = which.reshape(-1) == number
                source, target = here[members] - table.starts[our], there[members] - peer.starts[their]
                for transfer in self._post(table.things[our], source, peer.things[their], target, size):
                    transfers.append(transfer)  # at once: what was posted must end, whatever the next one does
            for transfer in transfers:
                transfer.wait(self.timeout + 5.0)
        finally:
            for transfer in transfers:
                transfer.cancel()
            for transfer in transfers:  # nothing may be read or written any more when this returns (C7)
                try:
                    transfer.wait()
                except FabricError:
                    pass

    def _post(self, handle: MrHandle, source: Ints, desc: MrDesc, target: Ints, size: int) -> Iterator[Transfer]:
        unit = int(np.gcd.reduce(np.concatenate([source, target]))) or 1
        if len(source) > 1 and max(int(source.max()), int(target.max())) // unit < 1 << 32:
            a, b = (Pages((offsets // unit).astype(np.uint32), unit) for offsets in (source, target))
            yield self.engine.submit_paged_writes(size, None, (handle, a), (desc, b), timeout=self.timeout)
            return
        for x, y in zip(source.tolist(), target.tolist(), strict=True):
            yield self.engine.submit_single_write(size, None, (handle, x), (desc, y), timeout=self.timeout)

    @staticmethod
    def _must_be_known(found: Ints, addresses: Ints, sizes: Ints, whose: str) -> None:
        if (wrong := np.nonzero(found < 0)[0]).size:
            first = int(wrong[0])
            raise BadRange(
                f"{int(sizes[first])} bytes at {int(addresses[first]):#x} are not in registered {whose}; so are "
                f"{wrong.size} of {len(found)} blocks"
            )

    def _rebuild(self) -> None:
        with self._lock:
            self._table = Table([(ptr, handle.nbytes, handle) for ptr, (handle, _) in self._ours.items()])

    # ---- hearing and answering

    def _on_word(self, data: bytes) -> None:
        try:
            word = msgspec.msgpack.decode(data, type=Where | Regions)
            if isinstance(word, Where):
                self._answer(word)
                return
        except (msgspec.DecodeError, FabricError) as error:
            log.warning("a message was thrown away: %s", error)
            return
        self._peers.heard(word)

    def _answer(self, word: Where) -> None:
        with self._lock:
            blobs = [blob for _, blob in self._ours.values()]
        room = max(1, (self._size - 64) // (max(map(len, blobs), default=0) + 8))
        parts = [blobs[i : i + room] for i in range(0, len(blobs), room)] or [[]]
        peer = NetAddr.parse(word.asker)
        for number, part in enumerate(parts):
            answer = msgspec.msgpack.encode(Regions(word.number, number, len(parts), part))
            self.engine.submit_send(peer, answer, timeout=self.timeout)


def _number(call: Callable[[], object]) -> int:
    """Return 0, or -1 for anything that was raised: an error that gets into SGLang's transfer threads ends them."""
    try:
        call()
    except Exception as error:
        expected = isinstance(error, FabricError | ValueError)
        log.warning("%s: %s", type(error).__name__, error, exc_info=None if expected else error)
        return -1
    return 0
