"""A prompt that nobody will ask for: who had it computed may say so, and nobody else; its blocks come back."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_fakes import LIMIT, request, scheduled, until
from vllm_halves import TO, blocks, half
from vllm_pair import D_BLOCKS, P_BLOCKS, TOTAL, Ranks, advance, asked, held, load, opening, pair, settle

from fabric_core import BadRange
from fabric_kvcache.vllm.card import DROP, Card, CardServer
from fabric_kvcache.vllm.params import key_of
from fabric_kvcache.vllm.waiting import Waiting

KEY = "k" * 32


@pytest.fixture
def open_rank() -> Iterator[Ranks]:
    with opening() as one:
        yield one


# ---- who may say so


def test_only_the_key_of_a_prompt_drops_it() -> None:
    waiting = Waiting()
    waiting.add("r", "t", KEY)
    waiting.add("q", "u", "")  # whose request brought no key
    assert not waiting.drop("t", KEY[:-1] + "x")
    assert not waiting.drop("t", "")
    assert not waiting.drop("u", "")
    assert not waiting.drop("other", KEY)
    assert waiting.take() == set()
    assert waiting.drop("t", KEY)
    assert waiting.take() == {"r"}
    waiting.discard("r")
    waiting.discard("r")
    assert waiting.take() == set()
    assert not waiting.drop("t", KEY)


def test_an_id_that_is_used_twice_belongs_to_the_later_request() -> None:
    waiting = Waiting()
    waiting.add("first", "t", KEY)
    waiting.add("second", "t", KEY[::-1] + "2")
    waiting.discard("first")
    assert waiting.drop("t", KEY[::-1] + "2")
    assert waiting.take() == {"second"}


@pytest.mark.parametrize("key", ["short", 7, "x" * 129, ["k" * 32]])
def test_a_key_that_makes_no_sense_is_refused_and_not_repeated(key: object) -> None:
    with pytest.raises(BadRange, match="16 to 128") as caught:
        key_of({"drop_key": key})
    assert str(key) not in str(caught.value)
    assert key_of(None) == key_of({}) == ""


def post(port: int, body: bytes, target: str = DROP, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    try:
        connection.request("POST", target, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_card_takes_it_by_post() -> None:
    said: list[tuple[str, str]] = []

    def drop(transfer_id: str, key: str) -> bool:
        said.append((transfer_id, key))
        return key == KEY

    server = CardServer("127.0.0.1", 0, lambda host, port: Card(engine="e", addresses=("a",)), drop)
    try:
        right: dict[str, Any] = {"transfer_id": "t", "drop_key": KEY}
        assert post(server.port, json.dumps(right).encode()) == 200
        assert post(server.port, json.dumps({**right, "drop_key": "wrong"}).encode()) == 404
        assert said == [("t", KEY), ("t", "wrong")]
        for wrong in (b"", b"[]", b"{", b'{"transfer_id": "t"}', b'{"transfer_id": 1, "drop_key": "k"}'):
            assert post(server.port, wrong) == 400
        assert post(server.port, b"x" * 5000) == 413
        assert post(server.port, b"", **{"Content-Length": "-1"}) == 413
        assert post(server.port, json.dumps(right).encode(), "/fabric/kv") == 404
        assert len(said) == 2
    finally:
        server.close()


# ---- what comes of it


def computed(key: str = KEY) -> tuple[Any, Any]:
    p = half(producer=True)
    one = request("r", 4, **TO, drop_key=key)
    p.allocated(one, blocks([5]), 0)
    p.step(scheduled({"r": 4}, new=[("r", ([5],), 0)]))
    return p, one


@pytest.mark.parametrize("when", ["while it is computed", "afterwards"])
def test_the_workers_are_told_until_they_have_let_go(when: str) -> None:
    p, one = computed()
    if when == "while it is computed":
        assert p.waiting.drop("t", KEY)
    assert p.finished(one, ([5],), well=True)[0]
    if when == "afterwards":
        assert p.waiting.drop("t", KEY)
    step = p.step(scheduled({}))
    assert step.held == {"r": ("t", 7.0)}
    assert step.unwanted == p.step(scheduled({})).unwanted == {"r"}
    p.reported(None, set(), {"r"})
    assert not p.step(scheduled({})).unwanted
    assert not p.waiting.drop("t", KEY), "it is known for as long as it waits only"


def test_a_prompt_whose_key_is_refused_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    p, one = computed("short")
    assert "drop_key" in caplog.text
    assert p.finished(one, ([5],), well=True) == (False, None)


def test_blocks_come_back_at_once_and_who_asks_later_is_refused(open_rank: Ranks) -> None:
    p, d = pair(open_rank)
    p.step(advance(P_BLOCKS, 0, TOTAL, TOTAL))
    p.step(**held())
    p.step(unwanted={"p-u"})
    assert not p.sent
    p.step(unwanted={"p-t"})
    assert p.sent == {"p-t"}
    p.step(unwanted={"p-t"})  # said once more, until the scheduler knows
    assert p.sent == {"p-t"}
    d.step(loads=[load([p], D_BLOCKS, TOTAL)])
    until(lambda: (p.poll(), d.poll(), "d-t" in d.ended)[2])
    assert "its client has left" in d.said.reasons["d-t"]


def test_a_prompt_that_was_asked_for_goes_on(open_rank: Ranks) -> None:
    """It is no way to break a transfer: its decoder has a cancel of its own."""
    p, d = pair(open_rank)
    d.step(loads=[load([p], D_BLOCKS, TOTAL)])
    asked(p)
    p.step(advance(P_BLOCKS, 0, TOTAL, TOTAL), unwanted={"p-t"})
    p.step(**held(), unwanted={"p-t"})
    settle(p, d)
    assert not d.failed
    assert "p-t" in p.said.sent, "it was stopped"


def test_an_id_may_be_used_again(open_rank: Ranks) -> None:
    """Without a transfer_id it is the client's X-Request-Id, which comes twice when the client tries again."""
    p, d = pair(open_rank)
    for _ in range(2):
        p.sent.clear()
        d.ended.clear()
        p.step(advance(P_BLOCKS, 0, TOTAL, TOTAL))
        p.step(**held())
        d.step(loads=[load([p], D_BLOCKS, TOTAL)])
        settle(p, d)
        assert not d.failed, d.said.reasons
