"""Where a peer is: told by whom, in what time, and what is said to those who are somebody else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from fabric_core import ConfigError, NetAddr, PeerLost, ProtocolError
from fabric_kvcache.lmcache.__main__ import load_timeout
from fabric_kvcache.lmcache.card import CardServer, fetch, host_port

ADDRESS = NetAddr.parse("local:somebody")


@pytest.fixture
def server() -> Iterator[CardServer]:
    made = CardServer("127.0.0.1:0", ADDRESS, 4096)
    yield made
    made.close()


def test_a_card_is_fetched(server: CardServer) -> None:
    assert fetch(f"127.0.0.1:{server.port}") == ADDRESS
    assert fetch(f"tcp://127.0.0.1:{server.port}") == ADDRESS
    server.close()
    server.close()
    with pytest.raises(PeerLost, match="no card at"):
        fetch(f"127.0.0.1:{server.port}")


def test_ipv6() -> None:
    try:
        server = CardServer("[::1]:0", ADDRESS, 4096)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    try:
        assert fetch(f"[::1]:{server.port}") == ADDRESS
    finally:
        server.close()


def test_somebody_who_takes_for_ever() -> None:
    """Each byte comes soon after the one before; the card never ends."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    while not stop.wait(0.01):
                        connection.sendall(b" ")
                except OSError:
                    pass

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(PeerLost, match="no card at"):
                fetch(f"127.0.0.1:{listener.getsockname()[1]}", 0.2)
        finally:
            stop.set()
            thread.join(60.0)


@pytest.mark.parametrize("card", [b"", b"{}", b'{"schema": "other"}', b"[1]", b'{"schema": "fabric.kv.lmcache/1"}'])
def test_somebody_else(server: CardServer, card: bytes) -> None:
    server.card = card
    with pytest.raises(ProtocolError, match="no fabric channel"):
        fetch(f"127.0.0.1:{server.port}")


@pytest.mark.parametrize("url", ["somewhere", "host:", ":7600", "host:70000", "host:x"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        host_port(url)


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (["server"], 30.0),
        (["server", "--p2p-load-timeout", "12", "--other", "x"], 12.0),
        (["server", "--p2p-load-timeout=7.5"], 7.5),
        (["server", "--p2p-load", "9"], 9.0),  # argparse takes what is clear
    ],
)
def test_the_time_that_lmcache_gives_a_load_is_known(words: list[str], seconds: float) -> None:
    assert load_timeout(words) == seconds
