"""A prefill engine's card: one JSON object over HTTP that says where its ranks are, and what its cache looks like.

Requests name the card's host and port, because that is what routers know; fabric's addresses hold the incarnation of
each rank and change with every start. The card is no secret, and nothing can be done with it but ask. Who has had a
prompt computed may also say here that nobody will ask for it, with the key that came with the request (waiting.py).
"""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated

import msgspec

from fabric_core import BackendError, ConfigError, ProtocolError

__all__ = ["DROP", "SCHEMA", "Card", "CardServer", "Drop", "fetch"]

log = logging.getLogger("fabric.kvcache.vllm")

SCHEMA = "fabric.kv.vllm/1"
PATH = "/fabric/kv"
DROP = f"{PATH}/drop"
_MOST = 1 << 20  # bytes of a card
_MOST_DROP = 4096  # bytes
_Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that are not known are ignored, so that a newer prefiller may say more."""

    engine: _Text  #: another one after each start
    addresses: Annotated[tuple[_Text, ...], msgspec.Meta(min_length=1, max_length=1024)]  #: of all ranks, TP order
    host: _Text = ""
    port: int = 0
    granule: int = 1  #: tokens of the smallest piece that moves
    packing: _Text = ""
    model: _Text = ""
    schema: str = SCHEMA

    def params(self, transfer_id: str) -> dict[str, object]:
        """Return the kv_transfer_params of a decode request whose prompt this engine computes."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_request_id": transfer_id,
            "remote_engine_id": self.engine,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": len(self.addresses),
            "transfer_mode": "push",
        }


class Drop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is sent to DROP: a prompt under this id, whose request brought this key, is not asked for any more."""

    transfer_id: _Text
    drop_key: _Text


class CardServer:
    """Serves a card until `close`. Its threads are daemons, and nobody waits for them."""

    def __init__(
        self,
        host: str,
        port: int,
        make: Callable[[str, int], Card],
        drop: Callable[[str, str], bool] = lambda _id, _key: False,
    ) -> None:
        """Serve it at once.

        Args:
            host, port: where; port 0: any.
            make: gives the card for the host and the port that was taken.
            drop: see `Waiting.drop`; called by any thread.

        Raises ConfigError: it cannot be bound.
        """
        try:
            self._server = _Server((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the prefiller's card cannot be served at {host}:{port}: {error}; choose another port, by kv_port or "
                "kv_connector_extra_config.port"
            ) from None
        self.port = int(self._server.server_address[1])
        self.card = make(host, self.port)
        self._server.octets = msgspec.json.encode(self.card)
        self._server.drop = drop
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="fabric-kv-card", daemon=True)
        thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    octets = b""
    drop: Callable[[str, str], bool]

    def handle_error(self, request: object, client_address: object) -> None:
        """Somebody has left before the answer: nothing that anybody has to hear of."""
        log.debug("the card was not sent to %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        found = self.path == PATH
        self._answer(200 if found else 404, self.server.octets if found else b"")

    def do_POST(self) -> None:
        """200: it was waiting, and does not any more. 404: nothing waits under that id and key."""
        assert isinstance(self.server, _Server)
        length = self.headers.get("Content-Length", "")
        if self.path != DROP:
            self._answer(404, b"")
            return
        if not length.isdecimal() or int(length) > _MOST_DROP:
            self._answer(413, b'{"error": "say Content-Length: at most 4096 bytes are read"}')
            return
        try:
            said = msgspec.json.decode(self.rfile.read(int(length)), type=Drop)
        except (msgspec.MsgspecError, ValueError) as error:
            self._answer(400, msgspec.json.encode({"error": f"transfer_id and drop_key were expected: {error}"}))
            return
        if self.server.drop(said.transfer_id, said.drop_key):
            self._answer(200, b"{}")
        else:
            self._answer(404, b'{"error": "nothing waits under that transfer_id and drop_key"}')

    def _answer(self, status: int, octets: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(octets)))
        self.end_headers()
        self.wfile.write(octets)

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


def fetch(host: str, port: int, timeout: float) -> Card:
    """Read a card. Raises BackendError: nobody answers there; ProtocolError: it is none."""
    where = f"{host}:{port}"
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("GET", PATH)
        answer = connection.getresponse()
        octets = answer.read(_MOST + 1)
    except (OSError, http.client.HTTPException) as error:
        raise BackendError(f"the prefiller's card at {where} cannot be read: {error}; is the engine up?") from None
    finally:
        connection.close()
    try:
        if answer.status != 200 or len(octets) > _MOST:
            raise ValueError(f"status {answer.status}, {len(octets)} bytes")
        card = msgspec.json.decode(octets, type=Card)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"what {where} says is no card of a prefiller: {error}") from None
    if card.schema != SCHEMA:
        raise ProtocolError(
            f"the card at {where} is {card.schema!r}, this version reads {SCHEMA}; install the same fabric-kvcache on "
            "both sides"
        )
    return card
