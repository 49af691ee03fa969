"""The parts that have no peer: arena, digests, balance, simulation."""

from __future__ import annotations

import queue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_core import ConfigError, TransferEngine
from fabric_rlweights.arena import Arena, aligned
from fabric_rlweights.balance import _heap, _sums
from fabric_rlweights.boxes import overlap, refine, volume
from fabric_rlweights.channel import Channel
from fabric_rlweights.digest import MASK, box_digest, run_digest
from fabric_rlweights.simulate import _queue


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 900)), max_size=60), st.integers(64, 4096))
def test_an_arena_hands_out_disjoint_ranges_and_never_more_than_its_limit(
    steps: list[tuple[bool, int]], limit: int
) -> None:
    arena = Arena(limit)
    held: list[tuple[int, int]] = []
    for take, size in steps:
        if take:
            if aligned(size) > arena.limit:
                with pytest.raises(ConfigError):
                    arena.take(size)
            elif (at := arena.take(size)) is not None:
                assert at >= 0
                assert at + aligned(size) <= arena.limit
                assert all(at >= b + aligned(n) or b >= at + aligned(size) for b, n in held)
                held.append((at, size))
        elif held:
            arena.give(*held.pop(size % len(held)))
        assert arena.used == sum(aligned(n) for _at, n in held) <= arena.peak <= arena.limit
    while held:
        arena.give(*held.pop())
    assert arena.take(arena.limit) == 0  # all in one piece again
    with pytest.raises(ValueError, match="free already"):
        Arena(256).give(0, 64)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 12), st.sampled_from([1, 2, 4, 8]), st.integers(0, 1 << 20), st.integers(1, 11)
)
def test_digests_of_parts_add_up_and_places_matter(rows: int, columns: int, item: int, seed: int, cut: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, rows * columns * item, dtype=np.uint8)
    whole = box_digest(data, 0, (rows, columns), (columns * item, item), item)
    cut = min(cut, rows)
    upper = box_digest(data, 0, (cut, columns), (columns * item, item), item)
    rest = rows - cut
    lower = box_digest(data, cut * columns * item, (rest, columns), (columns * item, item), item) if rest else 0
    assert (upper + lower) & MASK == whole
    if rows > 1 and not np.array_equal(data[: columns * item], data[-columns * item :]):
        swapped = data.copy()
        swapped[: columns * item], swapped[-columns * item :] = data[-columns * item :], data[: columns * item]
        assert box_digest(swapped, 0, (rows, columns), (columns * item, item), item) != whole
    assert run_digest(data.reshape(1, -1), item, np.zeros(1, np.int64)) == whole


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=80), st.lists(st.integers(0, 5000), min_size=1, max_size=6))
def test_both_ways_of_balancing_are_off_by_one_piece_at_most(sizes: list[int], load: list[int]) -> None:
    nbytes, have = np.sort(np.array(sizes))[::-1], np.array(load)
    for place in (_heap, _sums):
        chosen = place(nbytes, have.copy())
        after = have + np.bincount(chosen, weights=nbytes, minlength=len(have))
        level = max((nbytes.sum() + have.sum()) / len(have), have.max())
        assert after.max() <= level + nbytes.max()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=8
    )
)
def test_overlap_finds_what_a_grid_finds_and_refine_removes_it(rows: list[tuple[int, int, int, int]]) -> None:
    start, size = np.array([row[:2] for row in rows]), np.array([row[2:] for row in rows])
    grid = np.zeros((12, 12), int)
    for (a, b), (n, m) in zip(start, size, strict=True):
        grid[a : a + n, b : b + m] += 1
    group = np.zeros(len(rows), np.int64)
    assert (overlap(group, start, size) is not None) == (grid.max() > 1)
    assert overlap(np.arange(len(rows)), start, size) is None
    owner, s, n = refine(start, size)
    assert int(volume(n).sum()) == int(volume(size).sum())
    assert (np.bincount(owner, weights=volume(n)) == volume(size)).all()
    unique = np.unique(np.concatenate([s, n], axis=1), axis=0)
    assert overlap(np.zeros(len(unique), np.int64), unique[:, :2], unique[:, 2:]) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=30))
def test_queues_of_the_simulation_are_first_come_first_served(jobs: list[tuple[int, int, int]]) -> None:
    who, arrives, took = (np.array([job[k] for job in jobs]) for k in range(3))
    found = _queue(who, arrives.astype(float), took.astype(float))
    free: dict[int, float] = {}
    for k in np.lexsort((arrives, who)).tolist():
        free[who[k]] = max(free.get(who[k], 0.0), arrives[k]) + took[k]
        assert found[k] == pytest.approx(free[who[k]])


def test_an_engine_serves_one_role_at_a_time() -> None:
    with TransferEngine.open() as engine:
        first = Channel(engine, queue.Queue())
        with pytest.raises(ConfigError, match="each needs an engine of its own"):
            Channel(engine, queue.Queue())
        first.close()
        Channel(engine, queue.Queue()).close()
