"""The second phase of a dispatch in Python, where fabric-moe was built without its C part; else native/rest.c does it.

It runs on the engine's callback thread or in the receiving half, whoever is first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fabric_core import Expectation
from fabric_moe.generation import COUNTS, CREDIT, ROWS, Write
from fabric_moe.layout import MAGIC
from fabric_moe.routing import Places, Span
from fabric_moe.trouble import impossible_counts, other_step, overwritten

if TYPE_CHECKING:
    from fabric_moe.group import MoeGroup
    from fabric_moe.step import Step

__all__ = ["expect_counts", "place", "row_write"]


def expect_counts(group: MoeGroup, step: Step, peers: Sequence[str]) -> Expectation:
    """Begin to wait for the counts of all ranks; what they make possible follows."""
    gen = step.generation
    return gen.engine.expect_imm_count(
        gen.imms[step.slot][COUNTS], len(gen.members), lambda e: _counted(group, step, e), timeout=math.inf, peers=peers
    )


def row_write(step: Step, d: int, span: Span) -> Write:
    """Return the write of some of our rows for rank `d`."""
    gen = step.generation
    layout, size = gen.layout, gen.config.row_bytes
    src = step.slot * layout.out_stride + layout.out_rows + (int(step.route.starts[d]) + span.first) * size
    return Write(d, span.rows * size, src, layout.row_at(step.slot, span.slot))


def _counted(group: MoeGroup, step: Step, counts: Expectation) -> None:
    """The counts are here (or will not come, which the receiving half hears itself): send the rest."""
    from fabric_moe.dispatch import send_rest

    try:
        if counts.state == "done":
            send_rest(group, step)
    except Exception as error:  # the receiving half raises it
        step.error = error


def place(group: MoeGroup, step: Step) -> Places:
    """Place what is beyond the private rows, and send it. Called once, with the step's lock."""
    gen, slot = step.generation, step.slot
    places = Places(*_said(step), gen.config.private_max, gen.config.shared)
    late = [(d, span) for d in gen.members if (span := places.late(gen.rank, d, 0))]
    gen.post(slot, ROWS, [row_write(step, d, span) for d, span in late])
    for d in gen.members:
        if (turn := _next_turn(places, gen.rank, d, 0)) is not None:
            step.turn[d] = turn
    step.places = places
    _expect_credit(group, step)
    return places


def _said(step: Step) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Copy, once, what all ranks say, and check it: [R, R] rows from source for destination, [R] how many go early.

    Raises ProtocolError for what is of another step, what no rank of this shape can have, or our own counts if they are
    not those that we sent (C12).
    """
    gen, config, plan = step.generation, step.generation.config, step.route
    heads = gen.inbound.heads[step.slot].copy()
    counts = gen.inbound.counts[step.slot].astype(np.int64)
    window = int(gen.outbound.heads[step.slot]["private"])
    for rank in gen.members:
        head, row = heads[rank], counts[rank]
        found = (int(head["magic"]), int(head["generation"]), int(head["step"]), int(head["rank"]))
        if found != (MAGIC, gen.number, step.number, rank):
            raise other_step(rank, found[1:3], (gen.number, step.number))
        private, most, total = int(head["private"]), int(row.max()), int(row.sum())
        if rank == gen.rank and (private != window or not np.array_equal(row, plan.counts)):
            raise overwritten(rank, step.number)
        if private > config.private_max or most > config.max_tokens or total > config.stage_rows:
            raise impossible_counts(rank, private, most, total, config)
    counts[~gen.alive] = 0
    early = heads["private"].astype(np.int64)
    early[~gen.alive] = 0
    return counts, early


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
                found = (int(credit["magic"]), int(credit["generation"]), int(credit["step"]), int(credit["turn"]))
                if found != (MAGIC, gen.number, step.number, turn):
                    continue
                span = places.late(gen.rank, d, turn)
                assert span is not None
                writes.append(row_write(step, d, span))
                after = _next_turn(places, gen.rank, d, turn)
                if after is None:
                    del step.turn[d]
                else:
                    step.turn[d] = after
            gen.post(step.slot, ROWS, writes)
            _expect_credit(group, step)
    except Exception as error:  # the receiving half raises it
        step.error = error
