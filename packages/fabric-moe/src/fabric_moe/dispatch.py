"""Dispatch: tokens go to the ranks of their experts, each once for each rank.

send half      counts of all destinations to all ranks; the private rows; returns
in between     once the counts of all ranks are here, the rest goes straight to its place: by the proxy's thread, or in
               the receiving half, whoever is first
receive half   waits for the rows, and is the only half that waits for another rank
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_core import BadRange, Expectation
from fabric_moe import faults, kernels, second_phase
from fabric_moe.dtypes import Bytes
from fabric_moe.generation import COUNTS, CREDIT, ROWS, Generation, Write
from fabric_moe.layout import HEAD, MAGIC
from fabric_moe.received import Received
from fabric_moe.routing import Places, Span, route
from fabric_moe.second_phase import row_write
from fabric_moe.step import RECEIVED, SENT, Step

if TYPE_CHECKING:
    from fabric_moe.group import MoeGroup

__all__ = ["receive", "send"]


def send(group: MoeGroup, x: Any, ids: Any, weights: Any, scales: Any, live: int | None) -> Step:
    """See MoeGroup.dispatch_send."""
    config, gen = group.config, group.generation
    plan = route(config, ids, weights, live, gen.alive)
    tokens, torch = group.token_rows(x, "x", config.token_bytes, plan.tokens, config.dtype)
    extra = group.token_rows(scales, "scales", config.scale_bytes, plan.tokens)[0] if config.scale_bytes else None
    if scales is not None and extra is None:
        raise BadRange("scales were given, but the group was made with scale_bytes=0")
    number, slot = group.free_slot()
    faults.settle(group, slot)
    step = Step(number, slot, gen, plan, torch)
    group.steps[slot] = step
    group.next_step += 1

    if gen.proxy is None:
        _send_by_python(group, step, tokens, extra)
    else:
        gen.proxy.begin(slot, number, group.window.rows, plan.starts)
        step.counts = _expect_counts(group, step, gen.peers)
        gen.proxy.send_counts(slot)
        kernels.pack(gen.outbound.rows[slot], tokens, extra, plan, number & 0xFFFFFFFF)
        gen.proxy.send_rows(slot)
    return step


def _send_by_python(group: MoeGroup, step: Step, tokens: Bytes, extra: Bytes | None) -> None:
    gen, slot, plan, window = step.generation, step.slot, step.route, group.window.rows
    out = gen.outbound
    head = out.heads[slot]
    head["magic"], head["generation"], head["step"] = MAGIC, gen.number, step.number
    head["rank"], head["private"] = gen.rank, window
    out.counts[slot] = plan.counts
    base = slot * gen.layout.out_stride
    at = gen.layout.counts_at(slot, gen.rank)
    with step.lock:  # the counts may be complete, and the second phase begin, before the rows are packed
        step.counts = _expect_counts(group, step, gen.peers)
        gen.post(slot, COUNTS, [Write(rank, gen.layout.counts_stride, base, at) for rank in gen.members])
        kernels.pack(out.rows[slot], tokens, extra, plan, step.number & 0xFFFFFFFF)
        private = np.minimum(plan.counts, window)
        slot_of_us = gen.rank * gen.config.private_max
        gen.post(
            slot,
            ROWS,
            [row_write(step, d, Span(gen.rank, 0, int(private[d]), slot_of_us)) for d in gen.members if private[d]],
        )


def _expect_counts(group: MoeGroup, step: Step, peers: Sequence[str]) -> Expectation:
    gen = step.generation
    if gen.proxy is None:
        return second_phase.expect_counts(group, step, peers)
    step.counts = gen.expect(step.slot, COUNTS, len(gen.members), peers)  # held by the step: C looks at it
    gen.proxy.arm(step.slot, step.counts)
    return step.counts


def send_rest(group: MoeGroup, step: Step) -> Places:
    """Second phase: place what is beyond the private rows, and send it. Does it once, whoever calls."""
    with step.lock:
        if step.error is not None:  # part of it was sent: not once more
            raise step.error
        if step.places is not None:
            return step.places
        try:
            gen = step.generation
            if gen.proxy is None:
                places = second_phase.place(group, step)
            else:
                gen.proxy.rest(step.slot)
                places = Places(*gen.proxy.read(step.slot), gen.config.private_max, gen.config.shared)
                step.places = places
            group.window.saw(int(step.route.counts.max(initial=0)))
            return places
        except Exception as error:
            step.error = error
            raise


# ---- more rows than this rank's shared memory holds: they come in turns ----------------------------------------------


def _credit(step: Step, turn: int) -> None:
    """Tell the sources of this rank's `turn` that its shared memory is free for it."""
    gen, places = step.generation, step.places
    assert places is not None
    stamps = gen.inbound.rows[step.slot]["stamp"]
    for span in places.arriving(gen.rank, turn):
        # what lies there came in this step too, and must not look like what is to come
        stamps[span.slot : span.slot + span.rows] = ~step.number & 0xFFFFFFFF
    head = gen.outbound.credits[step.slot][gen.rank]  # one for all: it says the same to each
    head["magic"], head["generation"], head["step"], head["turn"] = MAGIC, gen.number, step.number, turn
    src = step.slot * gen.layout.out_stride + gen.layout.out_credits + HEAD * gen.rank
    dst = gen.layout.credit_at(step.slot, gen.rank)
    sources = [s for s in gen.members if places.late(s, gen.rank, turn)]
    gen.post(step.slot, CREDIT, [Write(s, HEAD, src, dst) for s in sources])


# ---- the receiving half ---------------------------------------------------------------------------------------------


def receive(group: MoeGroup, step: Step, timeout: float) -> Received:
    """See MoeGroup.dispatch_recv."""
    step.must_be(SENT, "dispatch_recv")
    deadline = time.monotonic() + timeout
    gen, slot = step.generation, step.slot
    heads = gen.inbound.heads[slot]
    assert step.counts is not None
    if gen.proxy is not None:
        gen.proxy.attend(slot)
    faults.wait(
        group, lambda peers: _expect_counts(group, step, peers), step, "counts", deadline,
        lambda: [s for s in gen.members if int(heads[s]["step"]) != step.number], step.counts,
    )  # fmt: skip
    places = send_rest(group, step)
    me, rows = gen.rank, gen.inbound.rows[slot]
    turns = places.turns(me)
    counts = places.counts[:, me]
    starts = np.concatenate([[0], np.cumsum(counts)])
    drained = np.empty(int(starts[-1]), gen.config.row_type) if turns > 1 else None
    for turn in range(turns):
        if turn:
            _credit(step, turn)
        writes = places.writes(me) if turns == 1 else len(list(places.arriving(me, turn)))
        faults.wait(
            group, lambda peers: gen.expect(slot, ROWS, writes, peers), step, "tokens", deadline,  # noqa: B023
            lambda: _late_sources(gen, step, list(places.arriving(me, turn))),  # noqa: B023
        )  # fmt: skip
        for span in places.arriving(me, turn) if drained is not None else ():
            to = int(starts[span.source]) + span.first
            drained[to : to + span.rows] = rows[span.slot : span.slot + span.rows]  # type: ignore[index]
    where = None if drained is not None else places.slots(me)
    received = Received(step, rows if drained is None else drained, where, starts)
    received.check_stamps(step.number & 0xFFFFFFFF)
    step.received = received
    step.state = RECEIVED
    return received


def _late_sources(gen: Generation, step: Step, spans: list[Span]) -> list[int]:
    stamps = gen.inbound.rows[step.slot]["stamp"]
    mark = step.number & 0xFFFFFFFF
    return sorted({s.source for s in spans if int(stamps[s.slot + s.rows - 1]) != mark})
