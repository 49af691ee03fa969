"""LMCache's own factory and classes over fabric. `make test-engines` runs it; LMCache 0.5.6 was tried."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lmcache.v1.distributed.transfer_channel.factory", reason="make test-engines runs it")

from lmcache.v1.distributed.internal_api import L1MemoryDesc  # type: ignore[import-not-found]
from lmcache.v1.distributed.transfer_channel import factory  # type: ignore[import-not-found]
from lmcache.v1.distributed.transfer_channel.abstract import (  # type: ignore[import-not-found]
    TransferChannelClient,
    TransferChannelContext,
    TransferChannelServer,
)
from lmcache.v1.distributed.transfer_channel.factory import (  # type: ignore[import-not-found]
    create_transfer_channel_context,
)

from fabric_core import PeerLost, ProtocolError, QueueFull
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
    assert us.context.engine.settings.heartbeat == 5.0
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


def test_reads_that_cannot_begin_are_told_apart(nodes: tuple[Node, Node]) -> None:
    """Each has its own number and its own objects, whichever is asked for first."""
    us, peer = nodes
    client = us.context.get_transfer_channel_client(peer.url)
    peer.context.close()
    end = time.monotonic() + LIMIT
    while us.context.reads.rights.knows(client._peer):  # until its farewell was heard
        assert time.monotonic() < end
        time.sleep(0)

    def submit(count: int) -> int:
        objects = list(range(count))
        task: int = client.submit_read(us.addresses(objects), us.addresses(objects))
        return task

    one, two = submit(1), submit(2)
    assert result(client, one) == [False]
    three = submit(3)
    assert result(client, two) == [False] * 2
    assert result(client, three) == [False] * 3


def test_an_engine_that_is_full_fails_the_read(nodes: tuple[Node, Node]) -> None:
    """LMCache's loop hears of a read that failed, not of an error that would abort other work."""
    us, peer = nodes
    client = us.context.get_transfer_channel_client(peer.url)

    def full() -> int:
        raise QueueFull("all immediates are in use")

    us.context.reads.engine.alloc_imm = full
    assert result(client, client.submit_read(us.addresses([0]), peer.addresses([0]))) == [False]
    del us.context.reads.engine.alloc_imm
    assert result(client, client.submit_read(us.addresses([0]), peer.addresses([0]))) == [True]


def test_a_client_that_is_removed_leaves_no_right(nodes: tuple[Node, Node]) -> None:
    us, peer = nodes
    for _ in range(3):
        client = us.context.get_transfer_channel_client(peer.url)
        assert result(client, client.submit_read(us.addresses([0]), peer.addresses([0]))) == [True]
        us.context.remove_transfer_channel_client(peer.url)
        assert not us.context.reads.rights._rights


def test_reads_end_before_lmcache_gives_them_up(nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes[0].context.reads.timeout == 25.0  # LMCache's default is 30
    monkeypatch.setattr(factory, "_TRANSFER_CHANNEL_FACTORY_REGISTRY", {})
    register(12.0)
    node = Node(3)
    try:
        assert node.context.reads.timeout == 10.0
    finally:
        node.context.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what LMCache logs with
def test_lmcaches_own_adapter_loads_over_it(nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lookups, which go over LMCache's own requests, are left out; its loads are whole."""
    from lmcache.v1.distributed import transfer_channel  # type: ignore[import-not-found]
    from lmcache.v1.distributed.l2_adapters import p2p_l2_adapter as p2p  # type: ignore[import-not-found]

    us, peer = nodes
    monkeypatch.setattr(transfer_channel, "_context", us.context)
    monkeypatch.setattr(p2p.RequestClientFactory, "create", lambda *a, **k: SimpleNamespace(close=lambda: None))
    adapter = p2p.P2PL2Adapter(p2p.P2PL2AdapterConfig("tcp://127.0.0.1:9", peer.url, load_timeout_s=LIMIT))
    keys = ["one", "two", "three"]

    def load() -> list[bool]:
        adapter._remote_addresses.update(zip(keys, peer.addresses([5, 9, 7]), strict=True))
        objects = [SimpleNamespace(shm_offset=ALIGN * at, shm_byte_length=ALIGN) for at in (1, 0, 8)]
        task, end = adapter.submit_load_task(keys, objects), time.monotonic() + LIMIT
        while (found := adapter.query_load_result(task)) is None:
            assert time.monotonic() < end, "a load has no end"
            time.sleep(0)
        return [found.test(i) for i in range(3)]

    assert load() == [True] * 3
    ours, theirs = (node.bytes.reshape(-1, ALIGN) for node in nodes)
    assert np.array_equal(ours[[1, 0, 8]], theirs[[5, 9, 7]])
    peer.context.close()
    assert load() == [False] * 3
    adapter.close()
    assert us.context.get_num_connected_clients() == 0


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
