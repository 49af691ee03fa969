"""Dispatch: tokens go to the ranks of their experts, each once for each rank.

send half      counts of all destinations to all ranks; the private rows; returns
in between     once the counts of all ranks are here, the rest goes straight to its place: on the engine's callback
               thread, or in the receiving half, whoever is first
receive half   waits for the rows, and is the only half that waits for another rank
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_core import BadRange, Expectation, ProtocolError
from fabric_moe import faults, kernels
from fabric_moe.generation import COUNTS, CREDIT, ROWS, Generation, Write
from fabric_moe.layout import HEAD, MAGIC
from fabric_moe.received import Received
from fabric_moe.routing import Places, Span, route
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

    out, window = gen.outbound, group.window.rows
    head = out.heads[slot]
    head["magic"], head["generation"], head["step"] = MAGIC, gen.number, number
    head["rank"], head["private"] = gen.rank, window
    out.counts[slot] = plan.counts
    base = slot * gen.layout.out_stride
    at = gen.layout.counts_at(slot, gen.rank)
    with step.lock:  # the counts may be complete, and the second phase begin, before the rows are packed
        step.counts = _expect_counts(group, step, gen.peers)
        gen.post(slot, COUNTS, [Write(rank, gen.layout.counts_stride, base, at) for rank in gen.members])
        kernels.pack(out.rows[slot], tokens, extra, plan, number & 0xFFFFFFFF)
        private = np.minimum(plan.counts, window)
        slot_of_us = gen.rank * config.private_max
        gen.post(
            slot,
            ROWS,
            [_row_write(step, d, Span(gen.rank, 0, int(private[d]), slot_of_us)) for d in gen.members if private[d]],
        )
    return step


def _expect_counts(group: MoeGroup, step: Step, peers: Sequence[str]) -> Expectation:
    gen = step.generation
    return gen.engine.expect_imm_count(
        gen.imms[step.slot][COUNTS], len(gen.members), lambda e: _proxy(group, step, e), timeout=math.inf, peers=peers
    )


def _row_write(step: Step, d: int, span: Span) -> Write:
    gen = step.generation
    layout, size = gen.layout, gen.config.row_bytes
    src = step.slot * layout.out_stride + layout.out_rows + (int(step.route.starts[d]) + span.first) * size
    return Write(d, span.rows * size, src, layout.row_at(step.slot, span.slot))


def _proxy(group: MoeGroup, step: Step, counts: Expectation) -> None:
    """The counts are here (or will not come, which the receiving half hears itself): send the rest."""
    try:
        if counts.state == "done":
            send_rest(group, step)
    except Exception as error:  # the receiving half raises it
        step.error = error


def send_rest(group: MoeGroup, step: Step) -> Places:
    """Second phase: place what is beyond the private rows, and send it. Does it once, whoever calls."""
    with step.lock:
        if step.error is not None:  # part of it was sent: not once more
            raise step.error
        if step.places is not None:
            return step.places
        try:
            return _send_rest(group, step)
        except Exception as error:
            step.error = error
            raise


def _send_rest(group: MoeGroup, step: Step) -> Places:
    gen, slot = step.generation, step.slot
    _check_heads(step)
    counts = gen.inbound.counts[slot].astype(np.int64)
    private = gen.inbound.heads[slot]["private"].astype(np.int64)
    counts[~gen.alive] = 0
    places = Places(counts, private, gen.config.private_max, gen.config.shared)
    late = [(d, span) for d in gen.members if (span := places.late(gen.rank, d, 0))]
    gen.post(slot, ROWS, [_row_write(step, d, span) for d, span in late])
    for d in gen.members:
        if (turn := _next_turn(places, gen.rank, d, 0)) is not None:
            step.turn[d] = turn
    step.places = places
    group.window.saw(int(step.route.counts.max(initial=0)))
    _expect_credit(group, step)
    return places


def _check_heads(step: Step) -> None:
    """Raise ProtocolError for counts that are of another step, or that no rank of this shape can have (C12)."""
    gen, config = step.generation, step.generation.config
    for rank in gen.members:
        head = gen.inbound.heads[step.slot][rank]
        found = (int(head["magic"]), int(head["generation"]), int(head["step"]), int(head["rank"]))
        if found != (MAGIC, gen.number, step.number, rank):
            raise ProtocolError(
                f"counts of rank {rank} are of generation {found[1]}, step {found[2]}; this rank is at generation "
                f"{gen.number}, step {step.number}: do all ranks make the same calls in the same order?"
            )
        private, most = int(head["private"]), int(gen.inbound.counts[step.slot][rank].max())
        if private > config.private_max or most > config.max_tokens:
            raise ProtocolError(
                f"rank {rank} says that it sends {private} private rows and up to {most} in all; at most "
                f"{config.private_max} and {config.max_tokens} are agreed"
            )


# ---- more rows than the shared memory of a destination holds: they go in turns ---------------------------------------


def _next_turn(places: Places, s: int, d: int, after: int) -> int | None:
    return next((turn for turn in range(after + 1, places.turns(d)) if places.late(s, d, turn)), None)


def _expect_credit(group: MoeGroup, step: Step) -> None:
    gen = step.generation
    if step.turn:
        step.credit = gen.engine.expect_imm_count(
            gen.imms[step.slot][CREDIT], 1, lambda _: _credited(group, step), timeout=math.inf, peers=gen.peers
        )


def _credited(group: MoeGroup, step: Step) -> None:
    """Destinations have emptied their shared memory: send them what comes next."""
    try:
        with step.lock:
            gen, places = step.generation, step.places
            assert places is not None
            assert step.credit is not None
            if step.credit.state != "done" or group.generation is not gen:
                return
            writes = []
            for d, turn in list(step.turn.items()):
                credit = gen.inbound.credits[step.slot][d]
                if int(credit["step"]) != step.number or int(credit["turn"]) != turn:
                    continue
                span = places.late(gen.rank, d, turn)
                assert span is not None
                writes.append(_row_write(step, d, span))
                after = _next_turn(places, gen.rank, d, turn)
                if after is None:
                    del step.turn[d]
                else:
                    step.turn[d] = after
            gen.post(step.slot, ROWS, writes)
            _expect_credit(group, step)
    except Exception as error:  # the receiving half raises it
        step.error = error


def _credit(step: Step, turn: int) -> None:
    """Tell the sources of this rank's `turn` that its shared memory is free for it."""
    gen, places = step.generation, step.places
    assert places is not None
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
        spans = list(places.arriving(me, turn))
        faults.wait(
            group, lambda peers: gen.expect(slot, ROWS, len(spans), peers), step, "tokens", deadline,  # noqa: B023
            lambda: _late_sources(gen, step, spans),  # noqa: B023
        )  # fmt: skip
        for span in spans if drained is not None else ():
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
