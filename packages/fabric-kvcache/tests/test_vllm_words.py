"""Options, kv_transfer_params, the card, and how a cache of vLLM is described."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest
from vllm_fakes import LIMIT, cache_of

from fabric_core import BackendError, BadRange, ConfigError, ProtocolError
from fabric_kvcache.cache import AttentionGroup, LatentGroup
from fabric_kvcache.vllm.caches import describe, layer_number
from fabric_kvcache.vllm.card import Card, CardServer, fetch
from fabric_kvcache.vllm.options import Options
from fabric_kvcache.vllm.params import recv_of, send_of

# ---- options


def test_options_have_defaults_and_take_what_they_know() -> None:
    assert Options.of({}) == Options()
    assert Options.of({"timeout": 5, "port": 0, "backend": "local"}) == Options(timeout=5.0, port=0, backend="local")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"time_out": 5}, "'timeout' meant"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"port": 70_000}, "port"),
        ({"nics": 9}, "nics"),
        ({"host": "0.0.0.0"}, "decoders are told to ask there"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(extra: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Options.of(extra)


# ---- kv_transfer_params


def test_both_sides_of_a_request_find_one_id() -> None:
    remote = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1}
    assert send_of("r", {"do_remote_decode": True, "transfer_id": "t"}) == "t"
    assert recv_of("q", {**remote, "transfer_id": "t", "remote_request_id": "u"}).transfer_id == "t"  # type: ignore[union-attr]
    assert recv_of("q", {**remote, "remote_request_id": "u"}).transfer_id == "u"  # type: ignore[union-attr]
    # With one X-Request-Id at both engines, vLLM's ids differ in what it adds only.
    left, right = "cmpl-x1-0-0123abcd", "cmpl-x1-0-89abcdef"
    assert send_of(left, {"do_remote_decode": True}) == recv_of(right, remote).transfer_id == "cmpl-x1-0"  # type: ignore[union-attr]


def test_requests_that_ask_for_nothing_get_nothing() -> None:
    for params in (None, {}, {"do_remote_decode": False, "do_remote_prefill": False}):
        assert send_of("r", params) is None
        assert recv_of("r", params) is None


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, "remote_host=None"),
        ({"remote_host": "h", "remote_port": 0}, "remote_port=0"),
        ({"remote_host": "h", "remote_port": 1, "transfer_id": 7}, "transfer_id=7"),
        ({"remote_host": "h", "remote_port": 1, "transfer_id": "x" * 129}, "1 to 128"),
        ({"remote_addresses": "local:p"}, "list of fabric addresses"),
        ({"remote_addresses": ["local:p"], "timeout": -1}, "timeout=-1"),
    ],
)
def test_parameters_that_make_no_sense_are_named(params: dict[str, object], says: str) -> None:
    with pytest.raises(BadRange, match=says):
        recv_of("r", {"do_remote_prefill": True, **params})


# ---- the card


def test_a_card_is_read_where_it_is_served() -> None:
    server = CardServer(
        "127.0.0.1", 0, lambda host, port: Card(engine="e1", addresses=("local:a", "local:b"), host=host, port=port)
    )
    try:
        card = fetch("127.0.0.1", server.port, LIMIT)
        assert card == server.card
        assert card.port == server.port
        params = card.params("t1")
        assert recv_of("any", params).transfer_id == "t1"  # type: ignore[union-attr]
        assert params["tp_size"] == 2
    finally:
        server.close()
    with pytest.raises(BackendError, match="is the engine up"):
        fetch("127.0.0.1", server.port, LIMIT)


def test_a_port_that_is_taken_is_named_with_the_cure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"{port}.*kv_port"):
            CardServer("127.0.0.1", port, lambda host, port: Card(engine="e", addresses=("a",)))


@pytest.mark.parametrize(
    ("octets", "says"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "engine"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n\xff\x00[]", "no card"),
        (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", "404"),
        (
            b'HTTP/1.1 200 OK\r\nContent-Length: 57\r\n\r\n{"engine":"e","addresses":["a"],"schema":"fabric.kv/9"}    ',
            "reads",
        ),
    ],
)
def test_what_is_no_card_is_refused(octets: bytes, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(octets)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError, match=says):
            fetch("127.0.0.1", server.getsockname()[1], LIMIT)
        thread.join()


# ---- how a cache lies


@pytest.mark.parametrize(
    ("order", "axes"), [("LBHN", "LPHTK"), ("LBNH", "LPTHK"), ("BLHN", "PLHTK"), ("BLNH", "PLTHK")]
)
def test_caches_whose_tokens_can_be_moved(order: str, axes: str) -> None:
    found = describe(cache_of(order=order), tp=1, rank=0)
    (group,) = found.shard.layout.groups
    assert isinstance(group, AttentionGroup)
    assert (group.letters, group.head_dim, group.page_tokens, group.layer_numbers) == (axes, 4, 4, (0, 1, 2))
    assert found.granule == 1
    assert [found.done(6, 10), found.done(10, 10), found.whole(10)] == [6, 10, 10]


def test_caches_whose_blocks_are_moved_count_in_blocks() -> None:
    found = describe(cache_of(), tp=1, rank=0, packing="cpu-vec")
    (group,) = found.shard.layout.groups
    assert isinstance(group, AttentionGroup)
    assert (group.page_tokens, group.head_dim) == (1, 16)
    assert found.granule == 4
    assert [found.done(6, 10), found.done(10, 10), found.whole(9)] == [1, 3, 3]


def test_latent_vectors() -> None:
    (group,) = describe(cache_of(heads=1, content=9, latent=True), tp=2, rank=1).shard.layout.groups
    assert isinstance(group, LatentGroup)
    assert (group.latent_dim, group.page_tokens) == (9, 4)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9, 13])
def test_a_window_of_blocks_holds_the_window_of_tokens(window: int) -> None:
    (group,) = describe(cache_of(window=window), tp=1, rank=0, packing="p").shard.layout.groups
    assert isinstance(group, AttentionGroup)
    for total in range(1, 40):
        first_token = max(0, total - window)
        first_block = max(0, -(-total // 4) - group.window)
        assert first_block <= first_token // 4


def test_groups_that_overlay_each_other() -> None:
    """vLLM's hybrid groups share one allocation: a block belongs to one of them at a time."""
    full, local = cache_of(layers=2), cache_of(layers=2, group=1, window=6, names="model.layers.1{}.attn".format)
    for mine, yours in zip(full, local, strict=True):
        yours.tensor.words, yours.tensor._octets = mine.tensor.words, mine.tensor._octets
    found = describe([*full, *local], tp=1, rank=0)
    assert found.groups == (0, 1)
    assert found.shard.bases == (0, 0)
    assert found.tables([[1], [2]]) == [[1], [2]]


def test_blocks_that_the_kernel_wants_smaller() -> None:
    caches = [replace(cache, split=2) for cache in cache_of()]
    found = describe(caches, tp=1, rank=0, packing="p")
    assert found.granule == 4
    assert found.tables([[3, 0, 5]]) == [[6, 7, 0, 1, 10, 11]]


def test_layers_that_are_apart_are_pools_of_their_own() -> None:
    caches = cache_of(layers=5)
    found = describe([caches[0], caches[1], caches[4]], tp=1, rank=0)
    assert [group.layer_numbers for group in found.shard.layout.groups] == [(0,), (1,), (4,)]


def test_what_cannot_be_described_is_named() -> None:
    with pytest.raises(ConfigError, match="one allocation"):
        describe([*cache_of(layers=1), *cache_of(layers=1, names="model.layers.7{}.attn".format)], tp=1, rank=0)
    with pytest.raises(ConfigError, match=r"blocks of \[4, 8\] tokens"):
        describe(
            [*cache_of(), *cache_of(tokens=8, group=1, names="m.1{}.attn".format)], tp=1, rank=0, packing="cpu-vec"
        )
    odd = cache_of(layers=1)
    odd[0].tensor.words = odd[0].tensor.words[:, :, ::2]
    odd[0].tensor.shape = odd[0].tensor.words.shape
    with pytest.raises(ConfigError, match="neither heads nor tokens in a row"):
        describe(odd, tp=1, rank=0)
    with pytest.raises(ConfigError, match="no KV cache"):
        describe([], tp=1, rank=0)
    with pytest.raises(ConfigError, match="one number"):
        layer_number("model.attn")
    assert layer_number("model.layers.12.self_attn.attn") == 12
