"""Small parts on their own: coverage, block tables, slots, the clock, poison."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_oracle import logical, memory, pool_pages, random_tables, ranks
from layout_strategies import layouts

from fabric_core import BadRange, Cancelled, FabricError, PeerLost, TransferEngine
from fabric_kvcache import PoolExhausted, poison
from fabric_kvcache.cache import AttentionGroup, CacheLayout, StateGroup, StatePart
from fabric_kvcache.clock import Clock
from fabric_kvcache.coverage import Coverage
from fabric_kvcache.shard import Shard
from fabric_kvcache.slots import SlotPool
from fabric_kvcache.tables import checked, used
from fabric_kvcache.target import Target


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=20), st.integers(0, 40), st.integers(0, 40))
def test_coverage_is_a_set_of_tokens(ranges: list[tuple[int, int]], a: int, b: int) -> None:
    coverage, tokens = Coverage(), set[int]()
    for first, count in ranges:
        new = set(range(first, first + count))
        if new & tokens:
            with pytest.raises(BadRange, match="pushed before"):
                coverage.add(first, first + count)
        else:
            coverage.add(first, first + count)
            tokens |= new
    first, end = sorted((a, b))
    missing = sorted(set(range(first, end)) - tokens)
    assert coverage.gap(first, end) == (missing[0] if missing else None)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.permutations(range(12)))
def test_coverage_does_not_grow_with_the_number_of_chunks(order: list[int]) -> None:
    coverage = Coverage()
    for k in order:
        coverage.add(5 * k, 5 * k + 5)
    assert (coverage._firsts, coverage._ends) == ([0], [60])


LAYOUT = CacheLayout(
    groups=(
        AttentionGroup(layers=(0, 2), kv_heads=1, head_dim=2, page_tokens=4, dtype="float16", window=6),
        StateGroup(layers=(1,), parts=(StatePart(name="s", units=1, unit_bytes=8),)),
    )
)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ([[0, 1, 2]], "1 block tables for a layout of 2 groups"),
        ([[0, 1], [0]], "table 0: 2 pages for 10 tokens, 3 are needed"),
        ([[0, 1, 5], [0]], "table 0: page 5 of a pool of 5"),
        ([[0, 1, -1], [0]], "page -1 of a pool"),
        ([[0, 1, 1], [0]], "named twice"),
        ([[0.5, 1, 2], [0]], "list of page numbers"),
        ([[0, 1, 2], [5]], "table 1: page 5 of a pool of 5"),
        ([[0, 1, 2], []], "table 1"),
    ],
    ids=str,
)
def test_tables_that_do_not_fit_are_refused_with_the_numbers(tables: list[list[int]], said: str) -> None:
    with pytest.raises(BadRange, match=said):
        checked(Shard(LAYOUT, pages=5), tables, 0, 10)


def test_pages_outside_a_window_or_before_the_start_may_be_the_same() -> None:
    """As in vLLM, where page 0 stands for those that are not there."""
    assert used(LAYOUT.groups[0], 0, 20) == (3, 5)
    got = checked(Shard(LAYOUT, pages=5), [[0, 0, 0, 1, 2, 4], [0]], 0, 20)
    assert [table.tolist() for table in got] == [[0, 0, 0, 1, 2], [0]]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layouts(), st.integers(1, 40), st.data())
def test_poison_is_exactly_what_a_request_wants(layout: CacheLayout, total: int, data: st.DataObject) -> None:
    """Filled: no other byte changes. Written: nothing is missing. One wanted byte run left out: its page is named."""
    start = data.draw(st.integers(0, total - 1))
    pages = pool_pages(layout, total, 2)
    rng = np.random.default_rng(total)
    tables = tuple(t.astype(np.uint32) for t in random_tables(layout, pages, total, rng))
    as_given = [t.astype(np.int64) for t in tables]
    ones = logical(layout, total, None)
    shard = data.draw(st.sampled_from(ranks(layout, pages)))
    mask = memory(shard, ones, as_given, total, start)
    octets = np.zeros(max(1, len(mask)), np.uint8)
    poison.fill(octets, shard, tables, start, total)
    # With scales the plan moves whole pages' scales; poison covers at least what the oracle names.
    assert (octets[: len(mask)][mask == 1] == poison.POISON).all()
    assert set(np.unique(octets)) <= {0, poison.POISON}
    poisoned = octets == poison.POISON
    if not any(getattr(group, "scale_bytes", 0) for group in layout.groups):
        assert np.array_equal(poisoned[: len(mask)], mask == 1), "a byte was filled that is not wanted"
    expected = poison.wanted_pages(shard, start, total)
    assert len(poison.missing(octets, shard, tables, start, total)) == len(
        {(m.layer, m.number, m.page) for m in poison.missing(octets, shard, tables, start, total)}
    )
    assert len(poison.missing(octets, shard, tables, start, total)) <= expected
    octets[poisoned] = 1
    assert poison.missing(octets, shard, tables, start, total) == []


def test_a_page_that_lacks_one_element_is_named() -> None:
    shard = Shard(LAYOUT, pages=5)
    octets = np.zeros(shard.nbytes, np.uint8)
    tables = (np.array([3, 1, 2], np.uint32), np.array([4], np.uint32))
    field = shard.fields(0)[0]
    at = field.base + field.layer + 2 * field.page + field.plane + field.token  # layer 2, page 2, V, its second token
    octets[at : at + 2] = poison.POISON
    assert [str(m) for m in poison.missing(octets, shard, tables, 0, 10)] == ["layer 2 page 2 (pool page 2)"]
    octets[:] = 0
    state = shard.fields(1)[0]
    octets[state.base + 4 * state.page :][:8] = poison.POISON
    assert [str(m) for m in poison.missing(octets, shard, tables, 0, 10)] == ["layer 1 page 0 (pool page 4)"]


def test_slots_do_not_overlap_and_run_out(engine: TransferEngine) -> None:
    pool = SlotPool(engine, 3, 70, write=True, what="requests")
    taken = [pool.take() for _ in range(3)]
    for number, slot in enumerate(taken):
        pool.at(slot)[:] = number
    assert [set(pool.at(slot).tolist()) for slot in taken] == [{0}, {1}, {2}]
    with pytest.raises(PoolExhausted, match="all 3 requests are in use"):
        pool.take()
    pool.give(taken[1])
    assert pool.take() == taken[1]
    pool.close()


def test_the_clock_calls_in_order_and_survives_what_it_calls() -> None:
    clock, heard, done = Clock("test-clock"), list[int](), threading.Event()
    began = time.monotonic()
    clock.call(0.05, lambda: heard.append(2))
    clock.call(0.05, done.set)
    clock.call(0.0, lambda: heard.append(0))
    clock.call(0.0, lambda: 1 // 0)
    clock.call(0.0, lambda: heard.append(1))
    assert done.wait(10)
    assert time.monotonic() - began >= 0.05
    clock.close()
    clock.call(0, lambda: heard.append(3))
    assert heard == [0, 1, 2]


class FakeTransfer:
    """A write that ends when it is told to; `cancel` only asks."""

    def __init__(self, done: Any) -> None:
        self.done_call, self.asked = done, False
        self.error: FabricError | None = None

    def exception(self) -> Any:
        return self.error

    def cancel(self) -> None:
        self.asked = True

    def end(self) -> None:
        self.error = Cancelled("cancelled") if self.asked else None
        self.done_call(self)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(["write", "end", "stop", "seal", "lost", "early", "wrong"]), max_size=30))
def test_a_target_ends_once_and_only_when_nothing_is_under_way(actions: list[str]) -> None:
    """R6: the decoder is told that nothing can land any more. In whatever order writes, ends and stops come."""
    target = Target(Any, Any, Any, Any, 0.0)  # type: ignore[arg-type]
    ends: list[int] = []
    flying: list[FakeTransfer] = []
    target.on_ended = lambda _: ends.append(len(flying))

    on_done = target.on_done(lambda: None)

    def submit(*, timeout: float) -> Any:
        flying.append(FakeTransfer(on_done))
        return flying[-1]

    def submit_wrongly(*, timeout: float) -> Any:
        raise BadRange("a page that is not there")

    def submit_and_end(*, timeout: float) -> Any:
        transfer = FakeTransfer(on_done)
        transfer.end()  # before the submit has returned
        return transfer

    written = 0
    for action in actions:
        if action in {"write", "early"}:
            took = target.write(1, 8, (submit if action == "write" else submit_and_end,))
            assert took == (target.stopped is None and not ends)
            written += took
        elif action == "wrong" and target.open:
            assert not target.write(1, 8, (submit_wrongly,))
            assert isinstance(target.error, BadRange)
            written += 1
        elif action == "seal" and not target.sealed:
            target.write(0, 0, (submit,), seal=True)
        elif action == "stop":
            target.stop("cancelled", "enough", Cancelled("enough"))
            assert all(transfer.asked for transfer in flying)
        elif action == "lost" and flying:
            transfer = flying.pop()
            transfer.error = PeerLost("gone")
            transfer.done_call(transfer)
            assert target.stopped is not None
        elif action == "end" and flying:
            flying.pop().end()
    while flying:
        flying.pop().end()
    assert target.writes == written
    assert ends == ([0] if target.sealed or target.stopped else []), "told while a write was under way, or not once"
    assert target.transfers() == []
    assert not target._early
