"""Fixtures of the kit."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from fabric_core import TransferEngine
from fabric_core.conformance.kit import Engines, Kit, Pair
from fabric_core.conformance.plugin import nic_counts
from fabric_core.conformance.remote import Remote, Remotes
from fabric_core.registry import get_backend

_serial = itertools.count(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "nics" in metafunc.fixturenames:
        counts = nic_counts(metafunc.config)
        metafunc.parametrize("nics", counts, ids=[f"{count}nic" for count in counts])


@pytest.fixture(scope="session")
def kit(request: pytest.FixtureRequest) -> Kit:
    option = request.config.getoption
    imports = tuple(option("--fabric-import"))
    for module in imports:
        importlib.import_module(module)
    backend, seed = option("--fabric-backend"), option("--fabric-seed")
    settings: dict[str, Any] = dict(option("--fabric-set"))
    if backend == "local" and seed:
        settings.setdefault("local_shuffle", seed)  # C2: what rests on an order must show here
    nics = nic_counts(request.config)
    return Kit(backend, option("--fabric-scale"), seed, option("--fabric-slack"), nics, imports, settings)


@pytest.fixture
def engines(kit: Kit) -> Iterator[Engines]:
    made = Engines(kit)
    yield made
    made.close()


@pytest.fixture
def engine(engines: Engines) -> TransferEngine:
    """One engine with one NIC."""
    return engines.open()


@pytest.fixture
def pair(engines: Engines) -> Pair:
    """Two engines with one NIC each."""
    return engines.pair()


@pytest.fixture
def wide(engines: Engines, nics: int) -> Pair:
    """Two engines with as many NICs each as --fabric-nics says."""
    return engines.pair(nics, nics)


@pytest.fixture
def remotes(kit: Kit) -> Iterator[Remotes]:
    if getattr(get_backend(kit.backend), "one_process", False):
        pytest.skip(f"the backend {kit.backend} reaches no engine of another process")
    made = Remotes(kit)
    yield made
    made.end()


@pytest.fixture
def remote(remotes: Remotes) -> Remote:
    """One peer with one NIC in a process of its own."""
    return remotes.start()


@pytest.fixture
def free_name(kit: Kit, engines: Engines) -> str:
    """A name nobody has, on a backend whose addresses are names; others cannot be asked for one."""
    name = f"kit{os.getpid()}-{next(_serial)}"
    with kit.open(name=name) as probe:
        if name not in str(probe.address):
            pytest.skip(f"the backend {kit.backend} has no names: its addresses read {probe.address}")
    return name
