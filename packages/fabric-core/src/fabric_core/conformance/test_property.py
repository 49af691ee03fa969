"""All verbs at once, in random mixes, with an account of every byte, count and callback (C1 to C5, C10)."""

from __future__ import annotations

import pytest

from fabric_core.conformance.kit import Engines, Kit
from fabric_core.conformance.ledger import IMMS, Inbox, Ledger, Plan, Step

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

CAPACITY = 4 << 20
LENGTHS = st.one_of(
    st.integers(0, 300),
    st.sampled_from([4095, 4096, 4097, 16_385, 65_535, 65_536, 65_537]),
    st.integers(0, 100_000),
)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    verb = draw(st.sampled_from(["write", "write", "paged", "scatter", "barrier", "send"]))
    length = draw(LENGTHS if verb == "write" else st.integers(0, 5000))
    parts = draw(st.integers(1, 12)) if verb in ("paged", "scatter", "barrier") else 1
    imm = draw(st.integers(0, IMMS - 1))
    silent = verb in ("write", "paged", "scatter") and draw(st.booleans())
    if silent:
        length = max(1, length)
    return Step(
        verb,
        draw(st.integers(0, 1)),
        draw(st.integers(0, 1)),
        length,
        parts,
        draw(st.integers(0, 70)),
        None if silent else imm,
        verb != "send" and draw(st.booleans()),
    )


plans = st.builds(Plan, st.lists(steps(), min_size=1, max_size=25).map(tuple), st.integers(0, 2**32), st.booleans())


@pytest.mark.parametrize(("mine", "theirs"), [(1, 1), (2, 1), (2, 3), (4, 4)])
def test_a_random_mix_leaves_the_books_balanced(engines: Engines, kit: Kit, mine: int, theirs: int) -> None:
    """C1-C5: each byte written exactly, each callback once, each count exact, nothing else touched."""
    kit.needs_nics(max(mine, theirs))
    pair = engines.pair(mine, theirs)
    inboxes = (Inbox(pair.a), Inbox(pair.b))

    @settings(
        max_examples=kit.scaled(8, 30, 1000),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink] if kit.scale == "long" else [Phase.generate],
    )
    @seed(kit.seed)
    @given(plans)
    def run(plan: Plan) -> None:
        Ledger(inboxes, CAPACITY, plan).play()

    run()
    assert engines.errors(pair.a).firsts == []
    assert engines.errors(pair.b).firsts == []
