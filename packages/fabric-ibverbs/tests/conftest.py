"""The tests share `verbs_rig.py`, which pytest's importlib mode does not find by itself, and engines on its devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric_core import TransferEngine

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def opened() -> Iterator[list[TransferEngine]]:
    engines: list[TransferEngine] = []
    yield engines
    for engine in reversed(engines):
        engine.close()


@pytest.fixture
def pair(opened: list[TransferEngine]) -> tuple[TransferEngine, TransferEngine]:
    """Two engines on two devices: what they say crosses a wire."""
    from verbs_rig import open_on

    opened += [open_on("rxe0"), open_on("rxe1")]
    return opened[0], opened[1]
