"""The `kv_transfer_params` of a request: the words that existing proxies and routers use, and ours.

Two ways of asking are understood:

*One after the other*, as toy proxies do: the prefill request says `do_remote_decode`; its answer has the parameters
with which the decode request is to be made (`do_remote_prefill`, `remote_host`, `remote_port`, `remote_request_id`).

*Both at once*, as `fabric kv proxy` does: both requests have the same `transfer_id`, and the decode request says where
the prefiller's card is. Layers then travel while later ones are computed. A prefill request may bring a `drop_key`,
with which it can be said later that nobody will ask for its prompt (waiting.py).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from fabric_core import BadRange

__all__ = ["Recv", "key_of", "recv_of", "send_of"]

_SUFFIX = re.compile(r"-[0-9a-f]{8}$")  # what vLLM adds to a request's id to make it its own


class Recv(msgspec.Struct, frozen=True):
    """A decode request: which transfer, and where its prefiller's ranks are, or its card."""

    transfer_id: str
    host: str = ""
    port: int = 0
    addresses: tuple[str, ...] = ()  #: of all ranks, if the request names them
    engine: str = ""  #: which incarnation of the prefiller is meant, if the request says so
    timeout: float | None = None  #: seconds


def _common(request_id: str) -> str:
    """Return a request's id without what vLLM added: equal on both sides if the proxy sent one X-Request-Id."""
    return _SUFFIX.sub("", request_id)


def _id(request_id: str, params: dict[str, Any], *keys: str) -> str:
    for key in keys:
        found = params.get(key)
        if found is not None:
            if not isinstance(found, str) or not 1 <= len(found) <= 128:
                raise BadRange(f"kv_transfer_params has {key}={found!r}: must be a text of 1 to 128 characters")
            return found
    return _common(request_id)[-128:]


def send_of(request_id: str, params: dict[str, Any] | None) -> str | None:
    """Return the transfer id of a prefill request, None for any other. Raises BadRange."""
    if not params or not params.get("do_remote_decode"):
        return None
    return _id(request_id, params, "transfer_id")


def key_of(params: dict[str, Any] | None) -> str:
    """Return the key of a prefill request, "" for none. Raises BadRange: it is too short to be one, or too long."""
    key = (params or {}).get("drop_key")
    if key is None:
        return ""
    if not isinstance(key, str) or not 16 <= len(key) <= 128:
        raise BadRange("kv_transfer_params has a drop_key that is no text of 16 to 128 characters")
    return key


def recv_of(request_id: str, params: dict[str, Any] | None) -> Recv | None:
    """Return what a decode request wants, None for any other. Raises BadRange: it does not say from where."""
    if not params or not params.get("do_remote_prefill"):
        return None
    transfer_id = _id(request_id, params, "transfer_id", "remote_request_id")
    addresses = params.get("remote_addresses") or ()
    host, port = params.get("remote_host"), params.get("remote_port")
    timeout = params.get("timeout")
    if not isinstance(addresses, list | tuple) or not all(isinstance(one, str) for one in addresses):
        raise BadRange(f"kv_transfer_params has remote_addresses={addresses!r}: must be a list of fabric addresses")
    if not addresses and not (isinstance(host, str) and host and isinstance(port, int) and 0 < port < 65_536):
        raise BadRange(
            f"kv_transfer_params has remote_host={host!r}, remote_port={port!r}: say where the prefiller's card is, or "
            "name its ranks in remote_addresses"
        )
    if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout <= 86_400):
        raise BadRange(f"kv_transfer_params has timeout={timeout!r}: seconds, above 0 and at most a day")
    return Recv(
        transfer_id=transfer_id,
        host=host if isinstance(host, str) else "",
        port=port if isinstance(port, int) else 0,
        addresses=tuple(addresses),
        engine=str(params.get("remote_engine_id") or ""),
        timeout=None if timeout is None else float(timeout),
    )
