"""Combine: what the experts made of the tokens goes back, summed as far as one rank can.

    send half      weights times the rows of a token's experts on this rank, added in float32 in the order of its top-k;
                   one row for each (token, rank) goes straight to its place
    receive half   waits for them, and adds the rows of a token in the order of the ranks

So the order of every sum is fixed by the routing alone: the same input gives the same bits, whatever arrives first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange
from fabric_moe import faults, kernels
from fabric_moe.dtypes import FLOATS, Bytes, as_rows, bits_of, is_torch, to_torch, type_name
from fabric_moe.errors import StepError
from fabric_moe.generation import SUMS, Generation, Write
from fabric_moe.layout import HEAD, HEAD_TYPE, MAGIC
from fabric_moe.step import DONE, RECEIVED, RETURNED, Step
from fabric_moe.trouble import other_sums

if TYPE_CHECKING:
    from fabric_moe.group import MoeGroup
    from fabric_moe.proxy import Proxy
    from fabric_moe.views import View

__all__ = ["DISCARDED", "receive", "result_type", "send"]

DISCARDED = 1  #: flag of a head: this rank computes nothing for the step


def _blocks(gen: Generation, step: Step) -> list[tuple[int, int, int]]:
    """For each source of tokens: its rank, how many rows we had from it, and where our block begins in its memory."""
    assert step.places is not None
    counts = step.places.counts
    found = []
    for s in gen.members:
        before = int(counts[s, : gen.rank].sum())
        found.append((s, int(counts[s, gen.rank]), gen.layout.sums_at(step.slot, gen.rank, before)))
    return found


def send(group: MoeGroup, view: View, y: Any, weighted: bool, dtype: str | None) -> None:
    """See MoeGroup.combine_send."""
    step = view.step
    step.must_be(RECEIVED, "combine_send")
    gen, config = step.generation, group.config
    if step is not group.steps[step.slot] or gen is not group.generation:
        raise StepError(f"{step!r} belongs to another group, or to a generation that is over")
    name = result_type(y, dtype, config.out_dtype)
    if len(y.shape) == 3 and y.shape[2] == config.hidden:
        y = y.reshape(y.shape[0] * y.shape[1], config.hidden)
    made = as_rows(y, config.hidden * bits_of(name) // 8, "y", name)
    if len(made) != view.rows:
        raise BadRange(f"y has {len(made)} rows, the view that it belongs to has {view.rows}")
    if gen.proxy is not None and len(step.received) <= config.stage_rows and kernels.in_c(made, name, config):
        _send_by_c(gen.proxy, step, made, name, *kernels.dense(*kernels.terms(view, weighted)))
    else:
        _send_blocks(group, step, lambda lo, hi, out: kernels.weigh(view, made, name, config, lo, hi, weighted, out), 0)
    step.state = RETURNED


def result_type(y: Any, dtype: str | None, bits: str) -> str:
    """Return the type of the experts' results: as told, or their own; integers are bits of the type `bits`."""
    if not hasattr(y, "dtype"):
        raise BadRange(f"y is a {type(y).__name__}: a torch tensor or a numpy array is wanted")
    name = dtype or type_name(y)
    if dtype is None and not is_torch(y) and name.startswith(("int", "uint")):
        name = bits
    if name not in FLOATS:
        raise BadRange(f"y is of {name}: experts' results are {', '.join(FLOATS)}; convert them, or give dtype=")
    return name


def discard(group: MoeGroup, step: Step) -> None:
    """Take no part in the combine of a step: the others hear it, and its memory becomes free."""
    step.must_be(RECEIVED, "discard")
    _send_blocks(group, step, lambda _lo, _hi, out: out.fill(0), DISCARDED)
    step.state = RETURNED


def _send_by_c(
    proxy: Proxy, step: Step, y: Bytes, name: str, at: NDArray[np.int64], weights: NDArray[Any] | None
) -> None:
    """The same as `_send_blocks`, where all fits at once and C knows the types."""
    assert step.places is not None
    starts = step.received.starts
    before = step.places.counts[:, : step.generation.rank].sum(axis=1)
    sums = proxy.sums(starts, before, 0)
    proxy.weigh(step.slot, sums, y, name, at, weights)
    proxy.send_sums(step.slot, sums)


def _send_blocks(group: MoeGroup, step: Step, rows_of: Any, flags: int) -> None:
    gen, config, slot = step.generation, group.config, step.slot
    size = config.sum_bytes
    base = slot * gen.layout.out_stride + gen.layout.out_sums
    memory = gen.outbound.bytes
    starts = step.received.starts
    writes: list[Write] = []
    at, used = base, 0
    for s, rows, dst in _blocks(gen, step):
        if used + rows > config.stage_rows:  # the staging memory is full: what is in it must have left
            gen.post(slot, SUMS, writes)
            faults.settle(group, slot)
            writes, at, used = [], base, 0
        head = np.ndarray((), HEAD_TYPE, gen.outbound.memory, at)
        head["magic"], head["generation"], head["step"] = MAGIC, gen.number, step.number
        head["rank"], head["flags"] = gen.rank, flags
        end = at + HEAD + rows * size
        if rows:
            rows_of(int(starts[s]), int(starts[s]) + rows, memory[at + HEAD : end].reshape(rows, size))
        writes.append(Write(s, end - at, at, dst))
        at, used = end, used + rows
    gen.post(slot, SUMS, writes)


def receive(group: MoeGroup, step: Step, out: Any, accumulate: bool, timeout: float) -> Any:
    """See MoeGroup.combine_recv."""
    step.must_be(RETURNED, "combine_recv")
    gen, slot = step.generation, step.slot
    target, rows = target_of(group, step, out)
    if accumulate and out is None:
        raise BadRange("accumulate=True needs out=: the rows to add to")
    deadline = time.monotonic() + timeout
    counts = step.route.counts
    faults.wait(
        group, lambda peers: gen.expect(slot, SUMS, len(gen.members), peers), step, "sums", deadline,
        lambda: [d for d in gen.members if int(_head(gen, step, d)["step"]) != step.number],
    )  # fmt: skip
    flags = _flags(gen, step) if gen.proxy is None else gen.proxy.check_sums(slot)
    gone = [int(d) for d in np.flatnonzero(flags & DISCARDED) if counts[d]]
    step.state = DONE
    step.received = None  # what was received may be large, and is over
    if gone:
        raise StepError(f"ranks {gone} discarded step {step.number}: there is no sum")
    kernels.reduce(rows, gen, step, accumulate)
    return target


def _head(gen: Generation, step: Step, d: int) -> Any:
    """The head in front of the sums of rank `d`."""
    return gen.inbound.head_at(gen.layout.sums_at(step.slot, d, int(step.route.starts[d])))


def _flags(gen: Generation, step: Step) -> NDArray[np.uint8]:
    """Return [R] the flags of the heads. Raises ProtocolError if one is not of this step."""
    flags = np.zeros(gen.config.ranks, np.uint8)
    for d in gen.members:
        head = _head(gen, step, d)
        found = (int(head["magic"]), int(head["generation"]), int(head["step"]), int(head["rank"]))
        if found != (MAGIC, gen.number, step.number, d):
            raise other_sums(d, found[1:3], step.number)
        flags[d] = int(head["flags"])
    return flags


def target_of(group: MoeGroup, step: Step, out: Any) -> tuple[Any, Any]:
    """Return what the caller gets, and the bytes of its rows."""
    config, tokens = group.config, step.route.tokens
    size = config.hidden * bits_of(config.out_dtype) // 8
    if out is None:
        made = np.empty((tokens, size), np.uint8)
        if step.torch:
            return to_torch(made, config.out_dtype), made
        return made.view(kernels.numpy_type(config.out_dtype)), made
    if not hasattr(out, "dtype"):
        raise BadRange(f"out= is a {type(out).__name__}: a torch tensor or a numpy array is wanted")
    contiguous = out.is_contiguous() if is_torch(out) else out.flags.c_contiguous and out.flags.writeable
    if not contiguous:
        raise BadRange("out= must be contiguous and writable")
    rows = as_rows(out, size, "out", config.out_dtype)
    if len(rows) != tokens:
        raise BadRange(f"out has {len(rows)} rows, step {step.number} has {tokens} tokens")
    return out, rows
