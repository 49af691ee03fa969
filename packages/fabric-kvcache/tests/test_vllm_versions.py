"""Versions of vLLM that lack what the connector is made of are refused by name, not by a missing attribute."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from fabric_core import Unsupported

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_OURS = "fabric_kvcache.vllm.connector"


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it imported anew; what was there comes back."""
    monkeypatch.setitem(sys.modules, _OURS, None)  # so that undoing puts it back, or takes it away again
    del sys.modules[_OURS]


def test_a_version_without_the_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = _BASE.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    stats = ModuleType("stats")
    stats.FabricPromMetrics = stats.FabricStats = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fabric_kvcache.vllm.stats", stats)
    _forget(monkeypatch)
    with pytest.raises(Unsupported, match=r"0\.30 to 0\.32.*cannot import name 'KVConnectorBase_V1'"):
        importlib.import_module(_OURS)


def test_without_vllm_that_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    _forget(monkeypatch)
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        importlib.import_module(_OURS)
