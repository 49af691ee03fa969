"""Shapes, memory, conversions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_cases import Case

from fabric_core import ConfigError
from fabric_moe import MoeConfig
from fabric_moe.dtypes import narrow, widen
from fabric_moe.layout import Layout
from fabric_moe.presets import preset
from fabric_moe.window import Window

GOOD = {"ranks": 4, "experts": 8, "topk": 2, "hidden": 64, "max_tokens": 16}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ranks": 0}, "ranks=0"), ({"experts": 0}, "experts=0"), ({"topk": 0}, "topk=0"),
        ({"hidden": -1}, "hidden=-1"),
        ({"max_tokens": 1.5}, r"max_tokens=1\.5"), ({"topk": True}, "topk"), ({"dtype": "int3"}, "no such element"),
        ({"out_dtype": "int8"}, "out_dtype='int8'"), ({"wire_dtype": "float8_e4m3fn"}, "wire_dtype"),
        ({"out_dtype": "float64", "wire_dtype": "float32"}, "float64 is for both"), ({"timeout": 0}, "timeout=0"),
        ({"private_tokens": 200}, "private_max"), ({"shared_rows": 0}, "shared_rows=0"), ({"depth": 17}, "depth=17"),
        ({"hidden": 3, "dtype": "float4_e2m1"}, "whole number of bytes"),
    ],
)  # fmt: skip
def test_a_wrong_shape_is_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MoeConfig(**{**GOOD, **wrong})


@given(st.data())
def test_the_memory_formula_is_what_is_registered(data: st.DataObject) -> None:
    most = data.draw(st.integers(0, 200))
    config = MoeConfig(
        ranks=data.draw(st.integers(1, 300)), experts=data.draw(st.integers(1, 999)),
        topk=data.draw(st.integers(1, 32)),
        hidden=data.draw(st.integers(1, 9000)), max_tokens=data.draw(st.integers(1, 5000)),
        scale_bytes=data.draw(st.integers(0, 300)), private_max=most, private_tokens=data.draw(st.integers(0, most)),
        shared_rows=data.draw(st.none() | st.integers(1, 10000)), depth=data.draw(st.integers(1, 4)),
    )  # fmt: skip
    layout = Layout.of(config)
    assert config.memory()["total"] == layout.in_bytes + layout.out_bytes


def test_a_group_registers_what_the_formula_says(opened: Any) -> None:
    case = Case(ranks=2, hidden=64, tokens=[8])
    group = opened(case)[0]
    gen = group.generation
    registered = len(gen.inbound.memory) + len(gen.outbound.memory)
    assert registered == case.config.memory()["total"]


def test_prefill_on_64_ranks_takes_less_than_4_gb() -> None:
    assert preset("prefill").config(64).memory()["total"] < 4e9
    assert preset("decode").config(64).memory()["total"] < 4e8


def test_window_grows_at_once_and_falls_back_slowly() -> None:
    window = Window(MoeConfig(**GOOD, private_tokens=4, private_max=40))  # type: ignore[arg-type]
    assert window.rows == 4
    window.saw(17)
    assert window.rows == 24
    window.saw(500)
    assert window.rows == 40
    for _ in range(63):
        window.saw(9)
        assert window.rows == 40
    window.saw(9)
    assert window.rows == 16
    for _ in range(64):
        window.saw(0)
    assert window.rows == 4


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_conversions_are_those_of_torch(name: str) -> None:
    """All 2^16 patterns of the short types, and float32 numbers between, at and beside their midpoints."""
    kind = getattr(torch, name)
    if name in ("bfloat16", "float16"):
        every = np.arange(1 << 16, dtype=np.uint16)
        mine = widen(every.view(np.uint8).reshape(1, -1), name)
        theirs = torch.from_numpy(every.view(np.int16).copy()).view(kind).float().numpy()
        np.testing.assert_array_equal(mine[0], theirs)
        mantissa = 16 if name == "bfloat16" else 13
        bits = np.random.default_rng(1).integers(0, 1 << 32, 300_000, dtype=np.uint64).astype(np.uint32)
        bits[::3] = bits[::3] >> mantissa << mantissa | 1 << mantissa - 1  # midpoints, which go to even
        bits[1::3] = bits[::3] + 1
        values = bits.view(np.float32)
    else:
        values = np.random.default_rng(2).standard_normal(1000).astype(name)
    found = narrow(values.reshape(1, -1), name)
    back = torch.from_numpy(found).view(kind)[0]
    wanted = torch.from_numpy(values.copy()).to(kind)
    nan = torch.isnan(wanted)
    assert torch.equal(torch.isnan(back), nan)
    assert torch.equal(back[~nan], wanted[~nan])
