"""Every byte exactly once, and the right one: random worlds against a load of the whole parameters."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import numpy as np
from dry_run import carry_out, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import World
from worlds import worlds

from fabric_rlweights.plan import Options


@settings(max_examples=60, deadline=None)
@given(world=worlds(), piece=st.sampled_from([1, 100, 1 << 20]), pages=st.sampled_from([1, 16, 4096]))
def test_a_plan_carried_out_is_a_cold_load(world: World, piece: int, pages: int) -> None:
    plan = plan_of(world, Options(piece_bytes=piece, pages_from=pages))
    done = carry_out(world, plan)
    tensors = plan.destination.tensors
    wanted = {(engine.rank, name): bits for engine in world.engines for name, bits in world.expected(engine).items()}
    for row, name in enumerate(tensors.names):
        expected = wanted[int(tensors.rank[row]), name]
        shape = (1,) * (tensors.shape.shape[1] - expected.ndim) + expected.shape
        np.testing.assert_array_equal(done.values(row), expected.reshape(shape))
        assert (done.counts(row) == 1).all()
        written = done.times[int(tensors.rank[row]), int(tensors.number[row])]
        assert written.max() == 1  # also between the elements, in padded rows, nothing is written twice
        assert written.sum() == expected.nbytes
    assert done.arrivals == {rank: plan.expected(rank) for rank in plan.receivers}


@settings(max_examples=20, deadline=None)
@given(world=worlds())
def test_the_proof_counts_what_there_is(world: World) -> None:
    plan = plan_of(world)
    expected = [world.expected(engine) for engine in world.engines]
    assert plan.proof.elements == sum(bits.size for tensors in expected for bits in tensors.values())
    assert sum(plan.proof.bytes.values()) == sum(bits.nbytes for tensors in expected for bits in tensors.values())
    assert int(plan.nbytes.sum()) == sum(plan.proof.bytes.values())
