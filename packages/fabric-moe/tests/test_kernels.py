"""The loops in C against numpy: the same bits, for every number that there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_cases import VIEWS, Case, run_steps

from fabric_moe import kernels

pytestmark = pytest.mark.skipif(kernels.NATIVE is None, reason="fabric-moe was built without its C part")


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_whole_steps_either_way(
    opened: Any, monkeypatch: pytest.MonkeyPatch, native: bool, view: str, out: str
) -> None:
    """Each is compared with the reference, so they are equal to each other."""
    if not native:
        monkeypatch.setattr(kernels, "NATIVE", None)
    case = Case(
        ranks=3, experts=7, topk=4, hidden=37, tokens=[9, 4, 0], out_dtype=out, view=view, routing="zipf",
        scale_bytes=3, accumulate=True, alignment=4,
    )  # fmt: skip
    assert run_steps(case, opened(case), 2) == 6


@given(st.data())
def test_gathered_rows(data: st.DataObject) -> None:
    size, count = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9))
    field = np.random.default_rng(1).integers(0, 256, (count, size + 5), np.uint8)[:, 2 : 2 + size]
    index = np.array(data.draw(st.lists(st.integers(-1, count - 1), max_size=20)), np.int64)
    wide = np.full((len(index), size + 3), 7, np.uint8)
    kernels.gather(field, index, wide[:, :size])
    for i, row in enumerate(index):
        assert wide[i, :size].tolist() == (field[row].tolist() if row >= 0 else [0] * size)
    assert (wide[:, size:] == 7).all()


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("weighted", [True, False])
def test_sums_of_any_bits(to: int, weighted: bool) -> None:
    """Random bit patterns, so denormals, infinities and NaNs too, against the same steps in numpy."""
    from fabric_moe.dtypes import narrow, widen

    dice = np.random.default_rng(to)
    hidden, rows, k = 4096, 5, 3
    y = dice.integers(0, 1 << 16, (8, hidden), np.uint16).view(np.uint8)
    at = dice.integers(-1, 8, (rows, k)).astype(np.int64)
    weights = dice.standard_normal((rows, k)).astype(np.float32)
    out = np.zeros((rows, hidden * (2, 4)[to]), np.uint8)
    acc = np.empty(hidden, np.float32)
    native = kernels.NATIVE
    kernels.NATIVE.lib.moe_weigh(
        kernels.pointer(y, "uint8_t"), 0, hidden, kernels.pointer(at, "int64_t"),
        kernels.pointer(weights, "float") if weighted else native.ffi.NULL, rows, k, kernels.pointer(acc, "float"),
        kernels.pointer(out, "uint8_t"), out.strides[0], to,
    )  # fmt: skip
    with np.errstate(all="ignore"):
        for i in range(rows):
            total = np.zeros(hidden, np.float32)
            for j in range(k):
                if at[i, j] >= 0:
                    term = widen(y[at[i, j]], "bfloat16")
                    total += weights[i, j] * term if weighted else term
            wanted = narrow(total.reshape(1, -1), ("bfloat16", "float32")[to])[0]
            found, nan = out[i], np.isnan(total)
            words = (np.uint16, np.uint32)[to]
            assert (found.view(words)[~nan] == wanted.view(words)[~nan]).all()
            assert np.isnan(widen(found, ("bfloat16", "float32")[to])[nan]).all()
