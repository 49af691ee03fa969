"""The three classes that LMCache asks of a transfer channel: context, server, client."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Any

from lmcache.v1.distributed.transfer_channel.abstract import (  # type: ignore[import-not-found]
    TransferChannelClient,
    TransferChannelContext,
    TransferChannelServer,
)
from lmcache.v1.distributed.transfer_channel.api import (  # type: ignore[import-not-found]
    TransferChannelAddress,
    TransferChannelReadResult,
)

from fabric_core import BadRange, FabricError, NetAddr, TransferEngine
from fabric_kvcache.lmcache.card import CardServer, fetch, host_port
from fabric_kvcache.lmcache.reads import Reads
from fabric_kvcache.patience import patient

__all__ = ["FabricTransferChannelClient", "FabricTransferChannelContext", "FabricTransferChannelServer"]

log = logging.getLogger("fabric.kvcache.lmcache")


class FabricTransferChannelServer(TransferChannelServer):  # type: ignore[misc]
    """Serves the card of this side: one JSON object, to whoever connects to `listen_url`."""

    def __init__(
        self, listen_url: str, advertise_url: str, l1_memory_desc: Any, *, context: FabricTransferChannelContext
    ) -> None:
        self._server = CardServer(listen_url, context.engine.address, int(l1_memory_desc.size))
        self.port: int = self._server.port

    def close(self) -> None:
        self._server.close()


class FabricTransferChannelClient(TransferChannelClient):  # type: ignore[misc]
    """Reads of one peer. A peer that was lost is looked up again at the next read."""

    def __init__(self, transfer_channel_server_url: str, *, context: FabricTransferChannelContext) -> None:
        self._url, self._context = transfer_channel_server_url, context
        self._peer: NetAddr | None = None
        self._failed: dict[int, int] = {}  # reads that could not even begin, and how many objects each has
        self._numbers = itertools.count(-1, -1)  # of those
        self._lock = threading.Lock()
        self._connect()

    def _connect(self) -> NetAddr:
        """Fetch the peer's card. Raises PeerLost: nobody answers; ProtocolError: somebody else does."""
        if self._peer is None or not self._context.reads.rights.knows(self._peer):
            self._peer = fetch(self._url)
            self._context.reads.rights.of(self._peer)  # registering takes its time: now rather than at the first read
        return self._peer

    def submit_read(
        self, local_addresses: list[TransferChannelAddress], remote_addresses: list[TransferChannelAddress]
    ) -> int:
        """What cannot be asked for makes a task that failed. BadRange (a ValueError): wrong ranges."""
        local = [(address.offset, address.size) for address in local_addresses]
        remote = [(address.offset, address.size) for address in remote_addresses]
        try:
            return self._context.reads.submit(self._connect(), local, remote)
        except BadRange:
            raise
        except FabricError as error:
            log.warning("%s", error)
            with self._lock:
                number = next(self._numbers)
                self._failed[number] = len(local)
            return number

    def query_read_status(self, task_id: int) -> TransferChannelReadResult:
        """See LMCache's class. Raises KeyError for a task that is not known, or of which the end was told."""
        with self._lock:
            if (objects := self._failed.pop(task_id, None)) is not None:
                return TransferChannelReadResult(finished=True, succeeded_mask=[False] * objects)
        good = self._context.reads.status(task_id)
        return TransferChannelReadResult(finished=good is not None, succeeded_mask=good or [])

    def close(self) -> None:
        if self._peer is not None:
            self._context.reads.forget(self._peer)


class FabricTransferChannelContext(TransferChannelContext):  # type: ignore[misc]
    """Owns the engine, the server and all clients.

    Args:
        backend: fabric's; None: FABRIC_BACKEND, or the best that works here.
        timeout: seconds of a read, after which nothing is written any more. Less than LMCache's own --p2p-load-timeout
            (30): it uses the memory again when that is over.

    Raises ConfigError for URLs that are none, OSError: the port is taken; what `TransferEngine.open` raises.
    """

    def __init__(
        self, l1_memory_desc: Any, listen_url: str, advertise_url: str, *, backend: str | None = None,
        timeout: float = 25.0,
    ) -> None:  # fmt: skip
        host_port(advertise_url)
        self._size = int(l1_memory_desc.size)
        self._clients: dict[str, FabricTransferChannelClient] = {}
        self._lock = threading.Lock()
        self.engine = TransferEngine.open("cpu", settings=patient(backend=backend))
        try:
            self.reads = Reads(self.engine, (int(l1_memory_desc.ptr), self._size), timeout=timeout)
            self._server = FabricTransferChannelServer(listen_url, advertise_url, l1_memory_desc, context=self)
        except BaseException:
            self.engine.close()
            raise

    def get_transfer_channel_server(self) -> FabricTransferChannelServer:
        return self._server

    def get_transfer_channel_client(self, peer_advertise_url: str) -> FabricTransferChannelClient:
        """Return the client for a peer, made at the first call. Raises PeerLost, ProtocolError."""
        with self._lock:
            found = self._clients.get(peer_advertise_url)
        if found is None:
            made = FabricTransferChannelClient(peer_advertise_url, context=self)
            with self._lock:
                found = self._clients.setdefault(peer_advertise_url, made)
        return found

    def remove_transfer_channel_client(self, peer_advertise_url: str) -> None:
        with self._lock:
            found = self._clients.pop(peer_advertise_url, None)
        if found is not None:
            found.close()

    def get_transfer_channel_address(self, lmcache_addresses: list[tuple[int, int]]) -> list[TransferChannelAddress]:
        """Return them as addresses. Raises ValueError for what is outside of the L1 memory."""
        for offset, size in lmcache_addresses:
            if offset < 0 or size < 0 or offset + size > self._size:
                raise ValueError(f"{size} bytes at {offset} are outside of the L1 memory of {self._size} bytes")
        return [TransferChannelAddress(offset=offset, size=size) for offset, size in lmcache_addresses]

    def get_num_connected_clients(self) -> int:
        with self._lock:
            return len(self._clients)

    def close(self) -> None:
        """Stop serving and reading, and close the engine. Idempotent."""
        if self.engine.closed:
            return
        self._server.close()
        with self._lock:
            clients = list(self._clients.values())
            self._clients.clear()
        try:
            for client in clients:
                client.close()
            self.reads.close()
        except FabricError as error:
            log.warning("%s", error)
        finally:
            self.engine.close()
