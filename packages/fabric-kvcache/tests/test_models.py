"""Tokens equal those of one process, for models whose caches are of different kinds. Two real processes, `local`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from peer_process import Peer
from tiny_models import NAMES

ROLE = Path(__file__).parent / "model_role.py"


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Peer, Peer]]:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: pip install 'fabric-kvcache[demo]'")
    prefiller = Peer(ROLE, "prefill")
    try:
        decoder = Peer(ROLE, "decode", prefiller.hear("{"))
        yield prefiller, decoder
        decoder.close()
    finally:
        prefiller.close()


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_one_process(pair: tuple[Peer, Peer], name: str) -> None:
    """The decoder computes no token of the prompt, and nothing moves that its layers cannot see. Page sizes differ."""
    prefiller, decoder = pair
    decoder.tell(name)
    prefiller.tell(name)
    answer = json.loads(decoder.hear("{"))
    prefiller.hear("served")
    assert answer["handed over"] == answer["alone"]
    assert len(set(answer["alone"])) > 3, "a model that repeats itself shows little"
    assert answer["logits equal"]
    assert answer["bytes"] == answer["bytes wanted"] > 0
