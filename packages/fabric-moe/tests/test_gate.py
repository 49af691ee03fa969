"""Experts drawn by chance: the even gate against its closed form, the limited one against a plain count."""

from __future__ import annotations

import numpy as np
import pytest

from fabric_core import ConfigError
from fabric_moe.gate import Limit, choose, draw, met
from fabric_moe.simulate import targets


def plainly(row: list[float], topk: int, limit: Limit | None) -> set[int]:
    """The same choice, one token at a time, by sorting."""
    experts = range(len(row))
    if limit is not None:
        size = len(row) // limit.groups
        worth = {g: sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(limit.groups)}
        good = sorted(worth, key=lambda g: worth[g])[-limit.most :]
        experts = [e for e in experts if e // size in good]  # type: ignore[assignment]
    return set(sorted(experts, key=lambda e: row[e])[-topk:])


@pytest.mark.parametrize(
    ("experts", "topk", "limit"),
    [
        (16, 4, None),
        (16, 4, Limit(4, 2)),
        (16, 4, Limit(4, 1)),
        (16, 4, Limit(1, 1)),
        (9, 9, Limit(3, 3)),
        (6, 2, Limit(6, 2)),  # a group is one expert
        (256, 8, Limit(8, 4)),
    ],
)
def test_the_choice_is_the_plain_one(experts: int, topk: int, limit: Limit | None) -> None:
    scores = np.random.default_rng(7).random((200, experts))
    found = choose(scores, topk, limit)
    assert found.shape == (200, topk)
    assert [set(row) for row in found.tolist()] == [plainly(row, topk, limit) for row in scores.tolist()]


@pytest.mark.parametrize("held", [[32] * 8, [4] * 64, [200, 50, 6]])
def test_an_even_gate_meets_what_the_closed_form_says(held: list[int]) -> None:
    bounds = np.concatenate([[0], np.cumsum(held)])
    ids = draw(np.random.default_rng(1), 20_000, 256, 8)
    assert met(ids, bounds) == pytest.approx(targets(256, held, 8), abs=0.03)


def test_a_limited_gate_meets_no_more_groups_than_it_may() -> None:
    """DeepSeek-V3's limit on 8 nodes: 4 at most, and nearly always 4, for the groups are chosen by their best experts.

    Groups that were chosen blindly would be met 4 x (1 - C(96, 8) / C(128, 8)) = 3.63 times.
    """
    ids = draw(np.random.default_rng(2), 20_000, 256, 8, Limit(8, 4))
    groups = np.arange(9) * 32
    most = max(len({e // 32 for e in row}) for row in ids.tolist())
    assert most == 4
    blind = 4 * (1 - np.prod([(96 - i) / (128 - i) for i in range(8)]))
    assert blind == pytest.approx(3.63, abs=0.01)
    assert blind < met(ids, groups) < 4
    assert met(ids, groups) == pytest.approx(3.95, abs=0.01)
    assert met(ids, np.array([0, 128, 256])) < 2  # two groups' worth of nodes may hold all four
    counts = np.bincount(ids.ravel(), minlength=256)
    assert counts.min() > 0.8 * counts.mean()  # over all tokens it is even


def test_if_all_of_the_chosen_groups_are_taken_exactly_so_many_are_met() -> None:
    ids = draw(np.random.default_rng(3), 500, 8, 4, Limit(4, 2))
    assert met(ids, np.arange(5) * 2) == 2.0


def test_met_counts_owners_once() -> None:
    bounds = np.array([0, 2, 4, 8])
    assert met(np.array([[0, 1, 1], [0, 3, 7], [7, 4, 6]]), bounds) == pytest.approx(5 / 3)


@pytest.mark.parametrize(
    ("limit", "topk", "words"),
    [
        (Limit(3, 1), 2, "groups=3: experts=16 must be a multiple"),
        (Limit(0, 1), 2, "groups=0"),
        (Limit(4, 5), 2, "most=5 groups of a token: from 1 to groups=4"),
        (Limit(4, 0), 2, "most=0"),
        (Limit(4, 1), 5, "topk=5: 1 of 4 groups hold 4 experts; raise most"),
        (None, 17, "topk=17 of experts=16"),
    ],
)
def test_what_cannot_be_chosen(limit: Limit | None, topk: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose(np.zeros((2, 16)), topk, limit)
