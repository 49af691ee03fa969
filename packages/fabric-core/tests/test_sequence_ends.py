"""Prepared sequences: what is refused, how they end, and what is said about it."""

from __future__ import annotations

import gc
import threading
import time

import pytest
from layer_ends import LAYER, LAYERS, LIMIT, PAGES, two, until

from fabric_core import (
    BadRange,
    ConfigError,
    DeadlineExceeded,
    Pages,
    PreparedSequence,
    QueueFull,
    StaleHandle,
    StepWrite,
    Unsupported,
    WaitTimeout,
)


def test_a_full_engine_ends_the_sequence_with_the_reason() -> None:
    """No completion comes, so it is full after 3 transfers."""
    with two(max_inflight=3, faults="drop=1,seed=1") as ends:
        sequence = ends.a.prepare_sequence([ends.layer(number) for number in range(5)])
        assert sequence.step(5) == 5
        assert isinstance(sequence.refused(), QueueFull)
        assert isinstance(sequence.error, QueueFull)
        assert (sequence.submitted, sequence.ended) == (5, 0)
        assert ends.a.stats()["inflight"] == 3
        with pytest.raises(WaitTimeout, match=r"of 5 steps 0 have ended within 0\.01 s"):
            sequence.wait(0.01)
        assert sequence.cancel(under_way=True) == 7
        with pytest.raises(QueueFull, match="FABRIC_MAX_INFLIGHT"):  # what came first
            sequence.wait(LIMIT)
        assert sequence.ended == 5


def test_each_write_ends_by_its_deadline() -> None:
    with two() as ends:
        now = time.monotonic()
        steps = [ends.layer(0, deadline=now + LIMIT), ends.layer(1, deadline=now - 1), ends.layer(2, timeout=LIMIT)]
        sequence = ends.a.prepare_sequence(steps)
        sequence.step(1)
        sequence.wait(LIMIT)
        sequence.step(3)
        assert isinstance(sequence.refused(), DeadlineExceeded)
        with pytest.raises(DeadlineExceeded):
            sequence.wait(LIMIT)
        assert ends.moved(0)
        assert ends.untouched(1)
        assert ends.untouched(2)


def test_memory_that_was_given_back_is_not_read() -> None:
    with two() as ends:
        sequence = ends.a.prepare_sequence([ends.layer(0), ends.layer(1)])
        ends.a.dereg_mr(ends.handle)
        sequence.step()
        assert isinstance(sequence.error, StaleHandle)
        assert sequence.cancel() == 4
        assert ends.untouched(0)


def test_a_wait_for_nothing_ends_at_once() -> None:
    with two() as ends:
        sequence = ends.a.prepare_sequence([ends.layer(0)])
        sequence.wait(0)
        with pytest.raises(BadRange, match="-1"):
            sequence.wait(-1)


def test_closed_it_says_so_and_what_was_submitted_goes_on() -> None:
    with two() as ends:
        sequence = ends.a.prepare_sequence(ends.layer(number) for number in range(3))
        sequence.step(2)
        sequence.close()
        sequence.close()
        for what in (sequence.step, lambda: sequence.value):
            with pytest.raises(StaleHandle, match="closed"):
                what()
        ends.b.expect_imm_count(ends.imm, 2 * PAGES, timeout=LIMIT).wait(LIMIT)
        assert ends.moved(1)
        assert ends.untouched(2)
        dropped = ends.a.prepare_sequence([ends.layer(2)])
        word = dropped.ptr
        del dropped  # without a close
        gc.collect()
        again = ends.a.prepare_sequence([ends.layer(2)])
        assert again.ptr == word  # its watch was free
        late = ends.a.prepare_sequence([ends.layer(2)])
        ends.a.close()
        with pytest.raises(Exception, match="closed"):
            late.step() and late.wait(LIMIT)
        late.close()


def test_close_while_another_thread_steps() -> None:
    with two() as ends:
        for _round in range(20):
            sequence = ends.a.prepare_sequence([ends.layer(number % LAYERS) for number in range(400)])
            gone: list[BaseException] = []

            def step(sequence: PreparedSequence = sequence, gone: list[BaseException] = gone) -> None:
                try:
                    while sequence.step():
                        pass
                except StaleHandle as error:
                    gone.append(error)

            thread = threading.Thread(target=step)
            thread.start()
            until(lambda s=sequence: s.submitted > 3)
            sequence.close()
            thread.join(LIMIT)
            assert not thread.is_alive()
            assert gone or sequence.submitted == 400
        until(lambda: ends.a.stats()["inflight"] == 0)


def test_what_cannot_be_is_named_with_its_step() -> None:
    with two() as ends:
        good, a = ends.layer(0), ends.a

        def write(**how: object) -> StepWrite:
            words = {"length": 8, "imm": None, "src": (ends.handle, 0), "dst": (ends.desc, 0)}
            return StepWrite(**{**words, **how})  # type: ignore[arg-type]

        for wrong, kind, text in [
            (write(length=LAYER * LAYERS + 1), BadRange, "step 1 .*outside"),
            (write(length=-1), BadRange, "write 2 of step 1"),
            (write(imm=1 << 30), BadRange, "step 1"),
            (write(imm=-1), BadRange, "imm=-1"),
            (write(nic=-1), BadRange, "nic=-1"),
            (write(nic=7), ConfigError, "step 1 .*no such NIC"),
            (write(lane=-1), BadRange, "lane=-1"),
            (write(lane=1 << 16), BadRange, "lane=65536"),
            (write(src=(ends.handle, Pages([0, 1], 8)), dst=(ends.desc, Pages([0], 8))), BadRange, "2 source pages, 1"),
            (write(src=(ends.handle, Pages([0], 8))), BadRange, "write 2 of step 1"),
        ]:
            with pytest.raises(kind, match=text):
                a.prepare_sequence([good, [*good, wrong]])
        with pytest.raises(BadRange, match="at least one"):
            a.prepare_sequence([])
        with pytest.raises(BadRange, match=r"write 0 of step 0 .*a source is"):
            a.prepare_sequence([[write(src=(7, 0))]])
        with pytest.raises(Unsupported, match="no GPU reaches"):
            a.stream_submit(a.prepare_sequence([good]))
        with pytest.raises(BadRange, match="step"):
            a.prepare_sequence([good]).step(0)
        a.close()
        with pytest.raises(Exception, match="closed"):
            a.prepare_sequence([good])
