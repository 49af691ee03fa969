"""Where a rank's part lies, from mesh and placements alone, against what torch says where torch can say it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_core import ConfigError
from fabric_rlweights.dtensor import local_indices, table_of

torch = pytest.importorskip("torch")


def ranks(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tuple(int(i) for i in at) for at in np.ndindex(*mesh)]


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 9),
    dp=st.integers(1, 4),
    tp=st.integers(1, 4),
    axis=st.integers(0, 1),
)
def test_fsdp_cuts_what_tp_has_cut(rows: int, columns: int, dp: int, tp: int, axis: int) -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    first = _StridedShard(0, split_factor=tp) if axis == 0 else Shard(0)
    whole = torch.arange(rows * columns).view(rows, columns)
    seen = np.zeros((rows, columns), int)
    for at in ranks((dp, tp)):
        found = local_indices("w", (rows, columns), (dp, tp), (first, Shard(axis)), at)
        part = whole
        for index, parts, along in ((at[1], tp, axis), (at[0], dp, 0)):  # TP, then FSDP, as those do it
            chunks = torch.chunk(part, parts, dim=along)
            part = chunks[index] if index < len(chunks) else part.narrow(along, 0, 0)
        np.testing.assert_array_equal(whole.numpy()[np.ix_(*found)], part.numpy())
        seen[np.ix_(*found)] += 1
    assert (seen == 1).all()


def test_replicas_hold_everything_and_partial_sums_are_refused() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    for at in ranks((2, 3)):
        found = local_indices("w", (4, 7), (2, 3), (Replicate(), Shard(1)), at)
        assert found[0].tolist() == [0, 1, 2, 3]
        assert found[1].tolist() == list(range(3 * at[1], min(3 * at[1] + 3, 7)))
    with pytest.raises(ConfigError, match=r"w: .*redistribute"):
        local_indices("w", (4,), (2,), (Partial(),), (0,))


def test_plain_tensors_are_whole_or_what_boxes_say() -> None:
    state: dict[str, Any] = {
        "a": torch.zeros(3, 4, dtype=torch.bfloat16),
        "b": torch.zeros(2, 4),
        "c": torch.zeros(0, 4),
    }
    table, buffers = table_of(5, state, rename="model.{}".format, boxes={"b": (((2, 0), (2, 4)), (6, 4))})
    assert [(s.param, s.shape, s.start, s.size, s.dtype) for s in table.shards] == [
        ("model.a", (3, 4), (0, 0), (3, 4), "bfloat16"),
        ("model.b", (6, 4), (2, 0), (2, 4), "float32"),
    ]
    assert [buffer.data_ptr() for buffer in buffers] == [state["a"].data_ptr(), state["b"].data_ptr()]
    with pytest.raises(ConfigError, match=r"b: its placements say that this rank holds \(3, 4\)"):
        table_of(0, {"b": state["b"]}, boxes={"b": (((2, 0), (3, 4)), (6, 4))})
    with pytest.raises(ConfigError, match="not contiguous"):
        table_of(0, {"a": state["a"].t()})
