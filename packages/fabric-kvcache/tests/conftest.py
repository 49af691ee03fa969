"""Prefillers in processes of their own; none outlives the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric_core import TransferEngine

# Tests share modules, which pytest's importlib mode does not find by itself.
sys.path.append(str(Path(__file__).parent))

from peer_process import Peer, Peers


@pytest.fixture(scope="session")
def _shared_peers() -> Iterator[dict[tuple[object, ...], Peer]]:
    shared: dict[tuple[object, ...], Peer] = {}
    yield shared
    for peer in shared.values():
        peer.close()


@pytest.fixture
def peers(_shared_peers: dict[tuple[object, ...], Peer]) -> Iterator[Peers]:
    starter = Peers(_shared_peers)
    yield starter
    for peer in starter.started:
        peer.close()


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine.open() as opened:
        yield opened
