"""A load that fails half-way, with vLLM's own reloading: no layer lacks memory afterwards, and the next load is whole.

Runs by `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not importable here: make test-vllm", allow_module_level=True)

import torch

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's model code is imported by the test

_ROWS = {"": slice(None), "q": slice(0, 4), "k": slice(4, 8)}
NAMES = ("first", "fused.q", "fused.k", "last")


def _loader(param: Any, loaded: Any, part: str) -> None:
    param.data[_ROWS[part]].copy_(loaded)


class _Layer(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, 3), requires_grad=False)
        self.weight.weight_loader = _loader  # type: ignore[attr-defined]


class _Model(torch.nn.Module):
    """A layer whose weight is two of the checkpoint's, between two plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fused, self.last = _Layer(5), _Layer(8), _Layer(2)

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            layer, _, part = name.partition(".")
            param: Any = getattr(self, layer).weight
            param.weight_loader(param, tensor, part)


def _checkpoint(salt: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(salt)
    rows = {"first": 5, "fused.q": 4, "fused.k": 4, "last": 2}
    return {name: torch.randn(rows[name], 3, generator=generator) for name in NAMES}


def _breaks_off(weights: dict[str, Any], after: int) -> Iterator[tuple[str, Any]]:
    for number, item in enumerate(weights.items()):
        if number == after:
            raise RuntimeError("planted")
        yield item


def _has(model: Any, weights: dict[str, Any], layers: tuple[str, ...] = ("first", "fused", "last")) -> bool:
    wanted = {
        "first": weights["first"], "fused": torch.cat([weights["fused.q"], weights["fused.k"]]), "last": weights["last"]
    }  # fmt: skip
    return all(torch.equal(getattr(model, name).weight, wanted[name]) for name in layers)


@pytest.mark.parametrize("after", range(4))
def test_a_load_that_breaks_off_leaves_whole_layers_and_the_next_one_loads_everything(after: int) -> None:
    from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
        record_metadata_for_reloading,
    )

    from fabric_rlweights.vllm.worker import FabricWeightTransferEngine

    model = _Model()
    record_metadata_for_reloading(model)
    engine: Any = FabricWeightTransferEngine.__new__(FabricWeightTransferEngine)
    engine.model, engine.device = model, torch.device("cpu")
    engine.model_config = SimpleNamespace(dtype=torch.float32)
    old, broken, new = (_checkpoint(salt) for salt in (1, 2, 3))
    engine._load(iter(old.items()))
    assert _has(model, old)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="planted"):
        engine._load(_breaks_off(broken, after))
    come = {0: (), 1: ("first",), 2: ("first",), 3: ("first", "fused")}[after]
    assert _has(model, broken, come)
    assert _has(model, old, tuple(name for name in ("first", "fused", "last") if name not in come))
    engine._load(iter(new.items()))
    assert _has(model, new)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
