"""LMCache's own factory and classes over fabric. `make test-engines` runs it; LMCache 0.5.6 was tried."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lmcache.v1.distributed.transfer_channel.factory", reason="make test-engines runs it")

from lmcache.v1.distributed.internal_api import L1MemoryDesc  # type: ignore[import-not-found]
from lmcache.v1.distributed.transfer_channel.abstract import (  # type: ignore[import-not-found]
    TransferChannelClient,
    TransferChannelContext,
    TransferChannelServer,
)
from lmcache.v1.distributed.transfer_channel.factory import (  # type: ignore[import-not-found]
    create_transfer_channel_context,
)

from fabric_core import PeerLost, ProtocolError
from fabric_kvcache.lmcache import register

SIZE, ALIGN, LIMIT = 1 << 18, 4096, 60.0


class Node:
    """One LMCache instance's L1 memory and its channel, made by LMCache's factory."""

    def __init__(self, salt: int) -> None:
        self.bytes = np.random.default_rng(salt).integers(0, 256, SIZE, np.uint8)
        desc = L1MemoryDesc(ptr=self.bytes.ctypes.data, size=SIZE, align_bytes=ALIGN)
        self.context: Any = create_transfer_channel_context(
            "fabric", desc, listen_url="127.0.0.1:0", advertise_url="127.0.0.1:7600"
        )
        self.url = f"127.0.0.1:{self.context.get_transfer_channel_server().port}"

    def addresses(self, objects: list[int]) -> Any:
        return self.context.get_transfer_channel_address([(ALIGN * at, ALIGN) for at in objects])


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    register()
    register()
    found = Node(1), Node(2)
    yield found
    for node in found:
        node.context.close()


def result(client: Any, task: int) -> list[bool]:
    end = time.monotonic() + LIMIT
    while not (found := client.query_read_status(task)).is_finished():
        assert found.succeeded_mask == []
        assert time.monotonic() < end, "a read has no end"
        time.sleep(0)
    mask: list[bool] = found.succeeded_mask
    return mask


def test_objects_of_a_peer_are_read(nodes: tuple[Node, Node]) -> None:
    us, peer = nodes
    assert isinstance(us.context, TransferChannelContext)
    assert isinstance(us.context.get_transfer_channel_server(), TransferChannelServer)
    client = us.context.get_transfer_channel_client(peer.url)
    assert isinstance(client, TransferChannelClient)
    assert us.context.get_transfer_channel_client(peer.url) is client
    assert us.context.get_num_connected_clients() == 1
    before, theirs = us.bytes.reshape(-1, ALIGN).copy(), peer.bytes.reshape(-1, ALIGN)
    here, there = [3, 0, 9, 40], [8, 7, 1, 63]
    assert result(client, client.submit_read(us.addresses(here), peer.addresses(there))) == [True] * 4
    before[here] = theirs[there]
    assert np.array_equal(us.bytes.reshape(-1, ALIGN), before)


def test_ends(nodes: tuple[Node, Node]) -> None:
    us, peer = nodes
    client = us.context.get_transfer_channel_client(peer.url)
    task = client.submit_read(us.addresses([0]), peer.addresses([0]))
    assert result(client, task) == [True]
    with pytest.raises(KeyError):
        client.query_read_status(task)
    with pytest.raises(ValueError, match="1 ranges here, 2 at the peer"):
        client.submit_read(us.addresses([0]), peer.addresses([0, 1]))
    with pytest.raises(ValueError, match="outside of the L1 memory"):
        us.context.get_transfer_channel_address([(SIZE - 1, 2)])
    us.context.remove_transfer_channel_client(peer.url)
    us.context.remove_transfer_channel_client(peer.url)
    assert us.context.get_num_connected_clients() == 0


def test_a_peer_that_came_back_is_found_again(nodes: tuple[Node, Node]) -> None:
    us, peer = nodes
    client = us.context.get_transfer_channel_client(peer.url)
    assert result(client, client.submit_read(us.addresses([0]), peer.addresses([0]))) == [True]
    port = int(peer.url.rpartition(":")[2])
    peer.context.close()
    assert result(client, client.submit_read(us.addresses([1]), us.addresses([1]))) == [False]
    desc = L1MemoryDesc(ptr=peer.bytes.ctypes.data, size=SIZE, align_bytes=ALIGN)
    again = create_transfer_channel_context(
        "fabric", desc, listen_url=f"127.0.0.1:{port}", advertise_url=f"127.0.0.1:{port}"
    )
    try:
        assert result(client, client.submit_read(us.addresses([2]), us.addresses([5]))) == [True]
        assert np.array_equal(us.bytes[2 * ALIGN : 3 * ALIGN], peer.bytes[5 * ALIGN : 6 * ALIGN])
    finally:
        again.close()


def test_who_is_not_there(nodes: tuple[Node, Node]) -> None:
    us, _ = nodes
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(PeerLost, match="no card at"):
        us.context.get_transfer_channel_client(f"127.0.0.1:{port}")
    with pytest.raises(ValueError, match="HOST:PORT"):
        us.context.get_transfer_channel_client("somewhere")


def test_somebody_else_answers(nodes: tuple[Node, Node]) -> None:
    us, _ = nodes
    us.context.get_transfer_channel_server()._server.card = b'{"schema": "other"}'
    with pytest.raises(ProtocolError, match="no fabric channel"):
        us.context.get_transfer_channel_client(us.url)
