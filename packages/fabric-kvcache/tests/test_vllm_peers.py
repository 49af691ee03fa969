"""What a worker half takes its peers for: started anew, or lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm_fakes import cache_of, until
from vllm_pair import D_BLOCKS, P_BLOCKS, TOTAL, Ranks, advance, held, opening, pair, settle

from fabric_core.config import Settings
from fabric_kvcache.vllm.card import Card
from fabric_kvcache.vllm.params import Recv
from fabric_kvcache.vllm.steps import Load


@pytest.fixture
def open_rank() -> Iterator[Ranks]:
    with opening() as one:
        yield one


def test_a_prefiller_that_was_started_anew_is_told_from_the_old_one(open_rank: Ranks) -> None:
    """A request for what the old one had computed ends at once; one for the new one is served, though the old card
    is known."""
    p, d = pair(open_rank)
    engine = ["old"]
    reads: list[str] = []

    def read(host: str, port: int, timeout: float) -> Card:
        reads.append(engine[0])
        return Card(engine=engine[0], addresses=(p.worker.address,), granule=4, packing="cpu-vec")

    assert d.worker.receives is not None
    d.worker.receives._read = read

    def of(name: str, incarnation: str) -> Load:
        return Load(f"d-{name}", Recv(name, host="h", port=1, engine=incarnation), (D_BLOCKS,), 0, TOTAL)

    def serve(name: str) -> None:
        p.step(advance(P_BLOCKS, 0, TOTAL, TOTAL, name=name))
        p.step(**held(name))
        settle(p, d, name)

    d.step(loads=[of("a", "old")])
    serve("a")
    engine[0] = "new"
    d.step(loads=[of("b", "new")])
    serve("b")
    assert not d.failed
    d.step(loads=[of("c", "old")])
    until(lambda: (d.poll(), "d-c" in d.ended)[1])
    assert "started anew" in d.said.reasons["d-c"]
    assert reads == ["old", "new", "new"], "once for each doubt"


def test_peers_have_time_unless_somebody_says_otherwise(open_rank: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def heartbeat(**options: Any) -> float:
        settings: Settings = open_rank(cache_of(), role="p", **options).worker.engine.settings
        return settings.heartbeat

    monkeypatch.delenv("FABRIC_HEARTBEAT", raising=False)
    assert heartbeat() == 5.0
    assert heartbeat(heartbeat=0.5) == 0.5
    monkeypatch.setenv("FABRIC_HEARTBEAT", "2")
    assert heartbeat() == 2.0
    assert heartbeat(heartbeat=0.5) == 0.5

    def contact() -> float:
        settings: Settings = open_rank(cache_of(), role="p").worker.engine.settings
        return settings.connect_timeout

    monkeypatch.delenv("FABRIC_CONNECT_TIMEOUT", raising=False)
    assert contact() == 10.0
    monkeypatch.setenv("FABRIC_CONNECT_TIMEOUT", "3")
    assert contact() == 3.0
