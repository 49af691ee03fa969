"""The ends of a request: in which order they are told, who gives its pages back, and what is found to be wrong."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from kv_pair import KV, LAYOUT, LIMIT, TOKENS, Pair, instance, open_pair, serve, until

from fabric_core import Cancelled, DeadlineExceeded, Pages, TransferEngine
from fabric_kvcache import Decoder, KvDamaged, PendingKv, Prefiller, PrefillRefused
from fabric_kvcache.protocol import SEAL

own = pytest.mark.parametrize("own", [True, False], ids=["own-pages", "users-pages"])


def memory_of(*, own: bool) -> dict[str, Any]:
    return {} if own else {"memory": np.zeros(LAYOUT.pool_bytes(16), np.uint8)}


def tables_of(*, own: bool) -> dict[str, Any]:
    return {} if own else {"tables": [[3, 1, 2]]}


# ---- told in order


@own
def test_a_request_is_done_before_it_is_settled_and_its_end_can_be_read_in_a_callback(own: bool) -> None:
    """A callback may also wait for it: it has ended."""
    heard: list[tuple[object, ...]] = []

    def done(pending: PendingKv) -> None:
        heard.append(("done", pending.done, pending.error))

    def settled(pending: PendingKv) -> None:
        heard.append(("settled", pending.done, pending.error, pending.wait(LIMIT).tokens))

    with open_pair(**memory_of(own=own)) as pair:
        job, pending = pair.start(on_done=done, on_settled=settled, **tables_of(own=own))
        serve(job)
        kv = pending.wait()
        assert pending.wait_settled(LIMIT)
        until(lambda: len(heard) == 2)
        assert heard == [("done", True, None), ("settled", True, None, TOKENS)]
        assert pending.wait() is kv
        kv.release()


@own
def test_a_bad_end_is_done_before_it_is_settled_too(own: bool) -> None:
    heard: list[tuple[object, ...]] = []
    with open_pair(**memory_of(own=own)) as pair:
        job, pending = pair.start(
            on_done=lambda p: heard.append(("done", p.done, type(p.error))),
            on_settled=lambda p: heard.append(("settled", p.done, type(p.error))),
            **tables_of(own=own),
        )
        assert pending.error is None
        job.abandon("no")
        until(lambda: len(heard) == 2)
        assert heard == [("done", True, PrefillRefused), ("settled", True, PrefillRefused)]
        with pytest.raises(PrefillRefused):
            pending.wait()
        assert pair.decoder.pool.free == 16


# ---- what nobody takes


@own
def test_a_cancel_gives_back_what_has_arrived_and_was_not_taken(own: bool) -> None:
    with open_pair(**memory_of(own=own)) as pair:
        job, pending = pair.start(**tables_of(own=own))
        serve(job)
        until(lambda: pending.done and pending.error is None)
        pending.cancel()
        with pytest.raises(Cancelled, match="under another request id"):
            pending.wait()
        assert type(pending.error) is Cancelled
        assert pending.wait_settled(LIMIT)
        decoder = pair.decoder
        until(lambda: (decoder.pool.free, decoder.slots.free, decoder.in_flight) == (16, decoder.slots.count, 0))
        assert decoder.pool.quarantined == 0


def test_a_cancel_leaves_what_was_taken() -> None:
    with open_pair() as pair:
        job, pending = pair.start()
        serve(job)
        kv = pending.wait()
        pending.cancel()
        assert pending.wait() is kv
        assert kv.layer(0)[0].shape == (2, TOKENS, 4)
        kv.release()
        pending.cancel()
        assert (pair.decoder.pool.free, pair.decoder.in_flight) == (16, 0)


def test_a_cancel_at_the_moment_of_arrival_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after the last step was taken, and before that is told."""
    with open_pair() as pair:
        job, pending = pair.start()
        finish = pending._finish

        def cancelled_first() -> None:
            pending.cancel()
            finish()

        monkeypatch.setattr(pending, "_finish", cancelled_first)
        serve(job)
        with pytest.raises(Cancelled):
            pending.wait()
        assert pending.wait_settled(LIMIT)
        assert (pair.decoder.pool.free, pair.decoder.in_flight) == (16, 0)


@pytest.mark.parametrize("arrived", [False, True])
def test_an_await_that_is_given_up_cancels(arrived: bool) -> None:
    with open_pair() as pair:
        made: list[PendingKv] = []

        async def ask() -> None:
            made.append(pair.ask())
            task = asyncio.ensure_future(wait(made[0]))
            await asyncio.sleep(0)  # it waits
            job = await asyncio.to_thread(pair.prefiller.next, LIMIT)
            if arrived:
                serve(job)
                until(lambda: made[0].done)  # and its task does not run, because the loop does not
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            if not arrived:
                job.abandon("over")

        async def wait(pending: PendingKv) -> None:
            await pending

        asyncio.run(ask())
        with pytest.raises(Cancelled):
            made[0].wait()
        assert made[0].wait_settled(LIMIT)
        assert (pair.decoder.pool.free, pair.decoder.in_flight) == (16, 0)


@pytest.mark.parametrize("asked", [2, 4])
def test_a_rank_that_gives_up_is_not_waited_for(asked: int) -> None:
    """Before the job is taken, and before or after the last rank has asked: the others get theirs."""
    with ExitStack() as stack:
        a = stack.enter_context(TransferEngine.open())
        source = stack.enter_context(Prefiller(a, instance(1), pages=8))
        ranks = []
        for tp in range(4):
            engine = stack.enter_context(TransferEngine.open())
            ranks.append(stack.enter_context(Decoder(engine, instance(4), tp=tp, pages=8)))

        def ask(decoders: list[Decoder]) -> list[PendingKv]:
            return [one.submit(a.address, TOKENS, request_id="r", timeout=LIMIT) for one in decoders]

        early = ask(ranks[:asked])
        until(lambda: len(source._targets) == asked)
        early[1].cancel()
        assert early[1].wait_settled(LIMIT)
        others = [early[0], *early[2:], *ask(ranks[asked:])]
        with source.take("r", LIMIT) as job:
            assert len(job.decoders) == 3
            for layer in job.layers:
                job.push_layer(layer, 0, KV, KV)
        for pending in others:
            pending.wait().release()
        assert source._waiting == {}
        assert not source._whole


# ---- what is found to be wrong


def write_seal(pair: Pair, pending: PendingKv, target: Any, epoch: int) -> None:
    """Write a seal that announces nothing, of this epoch."""
    seals = pair.prefiller.seals
    slot = seals.take()
    seals.at(slot)[:] = np.frombuffer(SEAL.pack(epoch, 0, 0), np.uint8)
    pair.a.submit_paged_writes(
        SEAL.size,
        pending._seal_imm,
        (seals.handle, Pages([0], SEAL.size, seals.offset(slot))),
        (target.session.slots, Pages([0], SEAL.size, target.head.seal_offset)),
    ).wait(LIMIT)
    seals.give(slot)


def test_the_seal_of_another_request_is_damage() -> None:
    """One that came late, from whoever had this slot before: what it counts is not of this request."""
    with open_pair(verify=False) as pair:
        job, pending = pair.start()
        (target,) = job._targets
        write_seal(pair, pending, target, pending.request.epoch - 1)
        with pytest.raises(KvDamaged, match="sealed another request"):
            pending.wait()
        job.abandon("over")
        assert pending.wait_settled(LIMIT)
        assert pair.decoder.pool.free == 16


def test_a_seal_that_comes_twice_is_damage() -> None:
    """All data are there, and the seal's immediate was raised once too often."""
    with open_pair() as pair:
        job, pending = pair.start()
        (target,) = job._targets
        target.writes += 1  # announced, and made below
        for layer in job.layers:
            job.push_layer(layer, 0, KV, KV)
        until(lambda: pending._phase == "data")
        for imm in (target.head.seal_imm, target.head.imm):
            pair.a.submit_barrier(None, None, imm, [target.session.slots]).wait(LIMIT)
        with pytest.raises(KvDamaged, match="raised"):
            pending.wait()
        assert pending.wait_settled(LIMIT)
        job.finish()
        assert pair.decoder.pool.free == 16


def test_a_prefiller_has_the_deadline_by_its_own_clock() -> None:
    """The decoder says nothing, because by its clock there is time left: the next push ends the job, and tells it."""
    with open_pair() as pair:
        job, pending = pair.start()
        (target,) = job._targets
        target.deadline = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="deadline of request"):
            job.push_layer(0, 0, KV, KV)
        assert (job.cancelled, job.pushes) == (True, [])
        with pytest.raises(PrefillRefused, match="deadline has passed"):
            pending.wait()
        job.abandon("over")
        assert pending.wait_settled(LIMIT)
        assert pair.decoder.pool.free == 16
