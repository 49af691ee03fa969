"""Where rows go, without a network: the arithmetic that sender and receiver share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_core import BadRange
from fabric_moe import MoeConfig, kernels
from fabric_moe.reference import owner_of
from fabric_moe.routing import Places, _in_c, _in_numpy, route

UNTIMED = settings(deadline=None)  #: a busy machine stands still now and then


@UNTIMED
@given(st.integers(1, 9), st.integers(1, 40))
def test_experts_belong_to_the_ranks_that_the_reference_says(ranks: int, experts: int) -> None:
    config = MoeConfig(ranks=ranks, experts=experts, topk=1, hidden=1, max_tokens=1)
    held = [list(config.experts_of(rank)) for rank in range(ranks)]
    assert [e for some in held for e in some] == list(range(experts))
    assert all(owner_of(e, experts, ranks) == rank for rank, some in enumerate(held) for e in some)


@UNTIMED
@given(st.data())
def test_each_token_goes_once_to_each_rank_of_its_experts(data: st.DataObject) -> None:
    ranks, experts = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 20))
    t, k = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 6))
    ids = np.array(
        data.draw(st.lists(st.lists(st.integers(-1, experts - 1), min_size=k, max_size=k), min_size=t, max_size=t)), int
    ).reshape(t, k)
    alive = np.array(data.draw(st.lists(st.booleans(), min_size=ranks, max_size=ranks)))
    config = MoeConfig(ranks=ranks, experts=experts, topk=k, hidden=1, max_tokens=12)
    plan = route(config, ids, None, None, alive)
    owners = [[owner_of(e, experts, ranks) for e in row if e >= 0] for row in ids.tolist()]
    wanted = [(d, i) for d in range(ranks) if alive[d] for i in range(t) if d in owners[i]]
    rank = np.repeat(np.arange(ranks), plan.counts)
    assert list(zip(rank.tolist(), plan.token.tolist(), strict=True)) == wanted
    assert plan.starts.tolist() == np.concatenate([[0], np.cumsum(plan.counts)]).tolist()
    assert plan.unreachable == sum(not alive[d] for row in owners for d in row)
    for row, (d, i) in enumerate(wanted):
        assert plan.turn[row] == sum(alive[other] for other in set(owners[i]) if other < d)


@pytest.mark.skipif(kernels.NATIVE is None, reason="fabric-moe was built without its C part")
@UNTIMED
@given(st.data())
def test_c_and_numpy_make_the_same_plan(data: st.DataObject) -> None:
    ranks, experts = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 20))
    t, k = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 6))
    dice = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    ids = dice.integers(-1, experts, (t, k)).astype(np.int32)
    alive = np.array(data.draw(st.lists(st.booleans(), min_size=ranks, max_size=ranks)))
    config = MoeConfig(ranks=ranks, experts=experts, topk=k, hidden=1, max_tokens=12)
    again = ids.copy()
    one, other = _in_c(config, ids, alive), _in_numpy(config, again, alive)
    assert one is not None
    assert [part.tolist() for part in one[:3]] == [part.tolist() for part in other[:3]]
    assert one[3] == other[3]
    assert ids.tolist() == again.tolist()  # those of ranks that are not alive have become -1


@UNTIMED
@given(st.data())
def test_no_two_rows_have_one_place_and_none_is_lost(data: st.DataObject) -> None:
    """Conservation and permutation: over all turns, the spans of a destination are each row of each source, once."""
    ranks = data.draw(st.integers(1, 6))
    cell = st.integers(0, 9)
    counts = np.array(
        data.draw(st.lists(st.lists(cell, min_size=ranks, max_size=ranks), min_size=ranks, max_size=ranks))
    )
    most = data.draw(st.integers(0, 5))
    private = np.array(data.draw(st.lists(st.integers(0, most), min_size=ranks, max_size=ranks)))
    shared = data.draw(st.integers(1, 12))
    places = Places(counts, private, most, shared)
    for d in range(ranks):
        seen: list[tuple[int, int]] = []
        for turn in range(places.turns(d)):
            slots: list[int] = []
            for span in places.arriving(d, turn):
                seen += [(span.source, span.first + i) for i in range(span.rows)]
                slots += range(span.slot, span.slot + span.rows)
                assert span.slot + span.rows <= ranks * most + shared
            assert len(slots) == len(set(slots))
        assert sorted(seen) == [(s, i) for s in range(ranks) for i in range(counts[s, d])]
        if places.turns(d) == 1:
            assert len(places.slots(d)) == counts[:, d].sum()


@pytest.mark.parametrize(
    ("ids", "weights", "live", "words"),
    [
        ([[0, 9]], None, None, "token 0 names expert 9"),
        ([[0, 1], [-2, 0]], None, None, "token 1 names expert -2"),
        ([[0, 1, 2]], None, None, "3 experts a token, topk is 2"),
        ([[0.5, 1]], None, None, "integers"),
        ([0, 1], None, None, "integers"),
        ([[0, 1]] * 5, None, None, "5 tokens in one step, max_tokens is 4"),
        ([[0, 1]], [[1.0]], None, "topk_weights"),
        ([[0, 1]], [["a", "b"]], None, "topk_weights"),
        ([[0, 1]], None, 2, "live=2"),
        ([[0, 1]], None, -1, "live=-1"),
    ],
)
def test_a_wrong_routing_is_refused_by_name(ids: object, weights: object, live: int | None, words: str) -> None:
    config = MoeConfig(ranks=2, experts=9, topk=2, hidden=1, max_tokens=4)
    with pytest.raises(BadRange, match=words):
        route(config, np.array(ids), None if weights is None else np.array(weights), live, np.ones(2, bool))


def test_more_than_max_tokens_is_fine_if_fewer_are_live() -> None:
    config = MoeConfig(ranks=2, experts=9, topk=2, hidden=1, max_tokens=4)
    assert route(config, np.zeros((9, 2), int), None, 4, np.ones(2, bool)).tokens == 4


def test_places_beyond_4_and_32_gib() -> None:
    """Offsets are 64-bit: 2,000 ranks that send 10^6 rows each to one."""
    counts = np.zeros((2000, 2000), np.int64)
    counts[:, 7] = 1_000_000
    places = Places(counts, np.full(2000, 32), 128, 1 << 31)
    span = places.late(1999, 7, 0)
    assert span is not None
    assert span.slot == 2000 * 128 + 1999 * (1_000_000 - 32)
    config = MoeConfig(ranks=2000, experts=4000, topk=8, hidden=7168, max_tokens=1 << 20, shared_rows=1 << 31)
    assert span.slot * config.row_bytes > 1 << 40
