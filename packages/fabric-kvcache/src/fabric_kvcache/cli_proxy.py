"""`fabric kv proxy`: before vLLM engines that prefill and engines that decode."""

from __future__ import annotations

from typing import Annotated

import typer

from fabric_core import ConfigError
from fabric_core.cli.guard import guarded

__all__ = ["proxy_command"]

_KV_PORT = 14579  # vLLM's default for kv_port


@guarded
def proxy_command(
    prefill: Annotated[
        list[str], typer.Option(help="http://HOST:PORT of an engine that prefills; several are taken in turn.")
    ],
    decode: Annotated[list[str], typer.Option(help="http://HOST:PORT of an engine that decodes.")],
    card: Annotated[
        list[str] | None,
        typer.Option(help="HOST:PORT of a prefill engine's card, in the order of --prefill. Default: its host, 14579."),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0: any.")] = 8000,
) -> None:
    """Serve the OpenAI interface with vLLM engines that run FabricConnector: see docs/vllm.md.

    Each request goes to a prefill and to a decode engine at once. Ends at Ctrl-C.
    """
    import asyncio
    import logging

    from fabric_kvcache.vllm.proxy import PrefillBackend, Proxy
    from fabric_kvcache.vllm.proxy_http import Backend

    at = [Backend.parse(url) for url in prefill]
    cards = [_card(text) for text in card or [f"{one.host}:{_KV_PORT}" for one in at]]
    if len(cards) != len(at):
        raise ConfigError(f"{len(cards)} cards for {len(at)} prefill engines: give one --card for each --prefill")
    proxy = Proxy(
        [PrefillBackend(one, where) for one, where in zip(at, cards, strict=True)],
        [Backend.parse(url) for url in decode],
    )
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        asyncio.run(proxy.serve(host, port))
    except KeyboardInterrupt:
        pass
    except OSError as error:
        raise ConfigError(
            f"the proxy cannot listen at {host}:{port}: {error.strerror}; choose another --port"
        ) from None


def _card(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError(f"--card {text!r}: expected HOST:PORT, which the prefill engine's log names")
    return host.strip("[]"), int(port)
