"""What the tests of the libfabric backend share: skip where it cannot run, and say why."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fabric_core.errors import FabricError
from fabric_efa import library
from fabric_efa.options import Options


def why_not(provider: str, source: str = "127.0.0.1") -> str:
    """Return why a provider cannot be used here, or ""."""
    try:
        options = Options()
        version, _api = library.versions(options)
    except FabricError as error:
        return str(error)
    if not library.offers(options, provider, source):
        return f"libfabric {version} has no provider {provider!r}"
    return ""


def usable_tcp() -> tuple[str, str]:
    """Return (provider, reason): the native tcp provider under the name that this library has for it."""
    try:
        major, minor = (int(part) for part in library.versions(Options())[0].split("."))
    except FabricError as error:
        return "tcp", str(error)
    name = "net" if (major, minor) < (1, 18) else "tcp"
    return name, why_not(name)


@pytest.fixture
def unusable() -> Callable[[str, str], str]:
    """(provider, source) -> why it cannot be used here, or ""."""
    return why_not


@pytest.fixture
def newer_library() -> str:
    """libfabric.so.1 of the mpich wheel, newer than most distributions', or ""."""
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((str(Path(str(f.locate())).resolve()) for f in files if f.name == "libfabric.so.1"), "")


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> str:
    """Engines of this test run over sockets, with no other setting than the test's own."""
    provider, reason = usable_tcp()
    if reason:
        pytest.skip(reason)
    for name in [name for name in os.environ if name.startswith("FABRIC_EFA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FABRIC_EFA_PROVIDER", provider)
    return provider
