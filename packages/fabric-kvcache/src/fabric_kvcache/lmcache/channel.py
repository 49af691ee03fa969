"""The three classes that LMCache asks of a transfer channel: context, server, client."""

from __future__ import annotations

import json
import logging
import socket
import socketserver
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

from fabric_core import ConfigError, FabricError, NetAddr, PeerLost, ProtocolError, TransferEngine
from fabric_kvcache.lmcache.reads import Reads

__all__ = ["FabricTransferChannelClient", "FabricTransferChannelContext", "FabricTransferChannelServer"]

log = logging.getLogger("fabric.kvcache.lmcache")
_SCHEMA = "fabric.kv.lmcache/1"
_MAX_CARD = 65536
_PATIENCE = 10.0  # seconds to fetch a card


def _host_port(url: str) -> tuple[str, int]:
    host, _, port = url.split("://", 1)[-1].rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{url!r}: HOST:PORT was expected, e.g. 10.0.0.1:7600")
    return host.strip("[]"), int(port)


class _Card(socketserver.BaseRequestHandler):
    """Tells whoever connects where the engine is."""

    def handle(self) -> None:
        self.request.settimeout(_PATIENCE)
        self.request.sendall(self.server.card)  # type: ignore[attr-defined]


class _CardServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    card = b""


class FabricTransferChannelServer(TransferChannelServer):  # type: ignore[misc]
    """Serves the card of this side: one JSON object, to whoever connects to `listen_url`."""

    def __init__(
        self, listen_url: str, advertise_url: str, l1_memory_desc: Any, *, context: FabricTransferChannelContext
    ) -> None:
        self._server = _CardServer(_host_port(listen_url), _Card)
        card = {"schema": _SCHEMA, "address": str(context.engine.address), "bytes": int(l1_memory_desc.size)}
        self._server.card = json.dumps(card).encode()
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="fabric-lmcache-card", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


class FabricTransferChannelClient(TransferChannelClient):  # type: ignore[misc]
    """Reads of one peer. A peer that was lost is looked up again at the next read."""

    def __init__(self, transfer_channel_server_url: str, *, context: FabricTransferChannelContext) -> None:
        self._url, self._context = transfer_channel_server_url, context
        self._peer: NetAddr | None = None
        self._failed: dict[int, int] = {}  # reads that could not even begin, and how many objects each has
        self._lock = threading.Lock()
        self._connect()

    def _connect(self) -> NetAddr:
        """Fetch the peer's card. Raises PeerLost: nobody answers; ProtocolError: somebody else does."""
        if self._peer is not None and self._context.knows(self._peer):
            return self._peer
        data = b""
        try:
            with socket.create_connection(_host_port(self._url), timeout=_PATIENCE) as connection:
                while len(data) <= _MAX_CARD and (more := connection.recv(4096)):
                    data += more
        except OSError as error:
            raise PeerLost(f"no card at {self._url}: {error}", op="connect", peer=self._url) from error
        try:
            card = json.loads(data)
            if card["schema"] != _SCHEMA:
                raise KeyError(card["schema"])
            self._peer = NetAddr.parse(card["address"])
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"what answers at {self._url} is no fabric channel of LMCache: {error!r}") from None
        self._context.meet(self._peer)
        return self._peer

    def submit_read(
        self, local_addresses: list[TransferChannelAddress], remote_addresses: list[TransferChannelAddress]
    ) -> int:
        """See LMCache's class. A peer that is gone makes a task that failed; BadRange (a ValueError): wrong ranges."""
        local = [(address.offset, address.size) for address in local_addresses]
        remote = [(address.offset, address.size) for address in remote_addresses]
        try:
            return self._context.reads.submit(self._connect(), local, remote)
        except (PeerLost, ProtocolError) as error:
            log.warning("%s", error)
            with self._lock:
                number = -1 - len(self._failed)
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
        _host_port(advertise_url)
        self._size = int(l1_memory_desc.size)
        self._clients: dict[str, FabricTransferChannelClient] = {}
        self._known: set[str] = set()  # peers that were not lost since we met
        self._lock = threading.Lock()
        self.engine = TransferEngine.open("cpu", backend)
        try:
            self.reads = Reads(self.engine, (int(l1_memory_desc.ptr), self._size), timeout=timeout)
            heard = self.engine.on_peer_lost
            self.engine.on_peer_lost = lambda error: self._lost(error, heard)
            self._server = FabricTransferChannelServer(listen_url, advertise_url, l1_memory_desc, context=self)
        except BaseException:
            self.engine.close()
            raise

    # ---- which peers are there

    def knows(self, peer: NetAddr) -> bool:
        """Whether a peer was not lost since it was met."""
        with self._lock:
            return str(peer) in self._known

    def meet(self, peer: NetAddr) -> None:
        """Remember a peer."""
        with self._lock:
            self._known.add(str(peer))

    def _lost(self, error: Any, heard: Any) -> None:
        lost = str(getattr(error, "peer", "")).partition("#")[0]
        with self._lock:
            self._known = {name for name in self._known if name.partition("#")[0] != lost}
        if heard is not None:
            heard(error)

    # ---- LMCache's calls

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
        for client in clients:
            client.close()
        try:
            self.reads.close()
        except FabricError as error:
            log.warning("%s", error)
        self.engine.close()
