"""Prepared sequences: what a word's steps submit, without Python."""

from __future__ import annotations

import threading
import time

import pytest
from layer_ends import LAYERS, LIMIT, PAGES, two, until, word_of

from fabric_core import BadRange, Cancelled
from fabric_core.sequence import Posted


def test_each_step_of_the_word_posts_its_layer() -> None:
    with two() as ends:
        sequence = ends.a.prepare_sequence(ends.layer(number) for number in range(LAYERS))
        assert (sequence.steps, sequence.submitted, sequence.ended, sequence.value) == (
            LAYERS,
            0,
            0,
            0,
        )
        assert sequence.posted_ns == []
        began = time.monotonic_ns()
        word_of(sequence).value = 1
        until(lambda: sequence.submitted == 1)
        assert sequence.step() == 1  # by this process, in this thread
        assert sequence.submitted == 2
        word_of(sequence).value = 9  # several at once
        until(lambda: sequence.submitted == 9)
        sequence.wait(LIMIT)
        assert sequence.ended == 9
        assert all(ends.moved(number) for number in range(9))
        assert all(ends.untouched(number) for number in range(9, LAYERS))
        assert sequence.step(4) == 0  # it never goes back
        assert sequence.value == 9
        assert sequence.step(LAYERS + 5) == LAYERS - 9  # more than there are
        assert sequence.step() == 0
        sequence.wait(LIMIT)
        ends.b.expect_imm_count(ends.imm, LAYERS * PAGES, timeout=LIMIT).wait(LIMIT)
        assert all(ends.moved(number) for number in range(LAYERS))
        assert sequence.error is None
        times = list(zip(sequence.seen_ns, sequence.posted_ns, strict=True))
        assert len(times) == LAYERS
        assert all(began <= seen <= posted <= time.monotonic_ns() for seen, posted in times)
        assert sequence.posted_ns == sorted(sequence.posted_ns)
        assert ends.a.stats()["inflight"] == 0
        sequence.close()
        assert ends.b.free_imm(ends.imm) == 0  # not one write too many


def test_transfers_may_be_taken_by_who_hears_of_them() -> None:
    with two() as ends:
        taken: list[Posted] = []
        heard = threading.Event()

        def look() -> None:
            taken.extend(sequence.take(len(taken), 2))
            taken.extend(sequence.take(len(taken), 2))
            if len(taken) == 3:
                heard.set()

        sequence = ends.a.prepare_sequence([ends.layer(0), [], ends.layer(1)], on_submitted=look)
        assert sequence.take(0) == []
        for wrong in ((-1, 1), (4, 1), (0, 0)):
            with pytest.raises(BadRange, match="steps 0 to 3"):
                sequence.take(*wrong)
        word_of(sequence).value = 3
        assert heard.wait(LIMIT)
        assert [len(posted.transfers) for posted in taken] == [2, 0, 2]
        assert [posted.posted_ns for posted in taken] == sequence.posted_ns
        assert [posted.seen_ns for posted in taken] == sequence.seen_ns
        for transfer in (*taken[0].transfers, *taken[2].transfers):
            assert transfer is not None
            transfer.wait(LIMIT)
        assert sequence.take(0, 1)[0].transfers == [None, None]  # once
        assert sequence.take(3) == []
        assert sequence.ended == 3
        assert ends.moved(0)
        assert ends.moved(1)
        sequence.close()


def test_nothing_is_submitted_after_a_cancel() -> None:
    """In the middle of a burst by another thread, which is not waited for at random: it goes on all the time."""
    for under_way in (False, True):
        with two() as ends:
            sequence = ends.a.prepare_sequence([ends.layer(number % LAYERS) for number in range(4000)])
            thread = threading.Thread(target=sequence.step, args=(4000,))
            thread.start()
            until(lambda s=sequence: s.submitted > 0)
            never = sequence.cancel(under_way=under_way)
            then = ends.a.stats()["groups"][0]["submitted"]
            thread.join(LIMIT)
            assert sequence.submitted == 4000  # counted on, and passed over
            assert ends.a.stats()["groups"][0]["submitted"] == then == 8000 - never
            assert sequence.cancel() == never
            try:
                sequence.wait(LIMIT)
            except Cancelled:
                assert under_way
            assert sequence.ended == 4000
            assert sequence.refused() is None
            sequence.close()


def test_a_lane_is_cancelled_and_the_others_go_on() -> None:
    with two() as ends:
        sequence = ends.a.prepare_sequence([*ends.layer(2 * n), *ends.layer(2 * n + 1, lane=1)] for n in range(5))
        sequence.step(2)
        assert sequence.cancel(1) == 6
        sequence.step(5)
        sequence.wait(LIMIT)
        assert [ends.moved(number) for number in range(10)] == [True] * 5 + [
            False,
            True,
            False,
            True,
            False,
        ]
        assert all(ends.untouched(number) for number in (5, 7, 9))
        sequence.close()
