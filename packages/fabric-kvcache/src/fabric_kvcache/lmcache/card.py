"""Where a peer's engine is: one JSON object, told to whoever connects to a HOST:PORT."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time

from fabric_core import ConfigError, NetAddr, PeerLost, ProtocolError

__all__ = ["CardServer", "fetch", "host_port"]

_SCHEMA = "fabric.kv.lmcache/1"
_MOST = 65536
_PATIENCE = 10.0  # seconds to tell or fetch a card


def host_port(url: str) -> tuple[str, int]:
    """Return both. Raises ConfigError (a ValueError) for what is none."""
    host, _, port = url.split("://", 1)[-1].rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{url!r}: HOST:PORT was expected, e.g. 10.0.0.1:7600")
    return host.strip("[]"), int(port)


def fetch(url: str, patience: float = _PATIENCE) -> NetAddr:
    """Return where the engine behind a URL is. Raises PeerLost: no answer in time; ProtocolError: somebody else's."""
    data, end = b"", time.monotonic() + patience
    try:
        with socket.create_connection(host_port(url), timeout=patience) as connection:
            while len(data) <= _MOST:
                connection.settimeout(max(end - time.monotonic(), 0.001))
                more = connection.recv(4096)
                if not more:
                    break
                data += more
                if time.monotonic() > end:
                    raise TimeoutError(f"it was not told within {patience:g} s")
    except OSError as error:
        raise PeerLost(f"no card at {url}: {error}", op="connect", peer=url) from error
    try:
        card = json.loads(data)
        if card["schema"] != _SCHEMA:
            raise KeyError(card["schema"])
        return NetAddr.parse(card["address"])
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"what answers at {url} is no fabric channel of LMCache: {error!r}") from None


class _Telling(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.settimeout(_PATIENCE)
        self.request.sendall(self.server.card)  # type: ignore[attr-defined]


class CardServer(socketserver.ThreadingTCPServer):
    """Serves in a thread of its own until `close`. Raises ConfigError for a URL that is none, OSError: port taken."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, listen_url: str, address: NetAddr, nbytes: int) -> None:
        host, port = host_port(listen_url)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Telling)
        self.card = json.dumps({"schema": _SCHEMA, "address": str(address), "bytes": nbytes}).encode()
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, name="fabric-lmcache-card", daemon=True)
        self._thread.start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Who hangs up before it was told is none of our concern."""

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()
        self._thread.join(5.0)
