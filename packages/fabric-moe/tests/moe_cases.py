"""Experts that every process computes alike, and steps that are compared with the reference.

Each process checks its own ranks without asking another one: inputs are made from a seed (moe_inputs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from moe_inputs import ROUTINGS, VIEWS, Case, Given, given

from fabric_moe import MoeGroup, Step, View
from fabric_moe.reference import reference

__all__ = [
    "ROUTINGS", "VIEWS", "Case", "Given", "compute", "dispatch", "expert", "finish", "given", "on_host", "raw",
    "run_steps", "same", "settle", "view_of", "wanted",
]  # fmt: skip


def expert(case: Case, number: int, rows: torch.Tensor) -> torch.Tensor:
    """What expert `number` makes of rows [n, token bytes + scale bytes] of uint8: [n, hidden], each row by itself."""
    size = case.config.token_bytes
    n = len(rows)
    kind = torch.float64 if case.config.wire == "float64" else torch.float32
    if not n:
        return torch.empty((0, case.hidden), dtype=getattr(torch, case.out_dtype))
    tokens = rows[:, :size].clone(memory_format=torch.contiguous_format)
    if case.dtype == "float4_e2m1":
        values = torch.stack([tokens & 15, tokens >> 4], dim=2).reshape(n, case.hidden).to(kind)
    else:
        values = tokens.view(getattr(torch, case.dtype)).to(kind)
    if case.scale_bytes:
        blocks = -(-case.hidden // case.scale_bytes)
        values = values * rows[:, size:].to(kind).repeat_interleave(blocks, dim=1)[:, : case.hidden] / 64
    return (values * (1 + number % 7) / 4 + number % 3).to(getattr(torch, case.out_dtype))


def raw(case: Case, mine: Given) -> torch.Tensor:
    """The bytes of a rank's tokens and scales, as the experts take them."""
    t = len(mine.x)
    size = case.config.token_bytes
    tokens = mine.x.contiguous().view(torch.uint8) if t else torch.empty((0, size), dtype=torch.uint8)
    return tokens if mine.scales is None else torch.cat([tokens, mine.scales], dim=1)


def wanted(case: Case, rank: int, step: int, masked: Sequence[int] = ()) -> torch.Tensor:
    """What the rank must get."""
    mine = given(case, rank, step)
    found = reference(
        [raw(case, mine)], [mine.ids], [mine.weights], lambda e, rows: expert(case, e, rows),
        ranks=case.ranks, experts=case.experts, hidden=case.hidden, out_dtype=case.out_dtype,
        wire_dtype=case.config.wire,
        added=[mine.added] if case.accumulate else None, masked=masked, weighted=case.weighted,
    )[0]  # fmt: skip
    assert isinstance(found, torch.Tensor)
    return found


def dispatch(case: Case, group: MoeGroup, step: int) -> Any:
    mine = given(case, group.rank, step)
    x, ids, weights = (tensor.to(case.device) for tensor in (mine.x, mine.ids, mine.weights))
    scales = None if mine.scales is None else mine.scales.to(case.device)
    return group.dispatch_send(x, ids, weights, scales=scales)


def compute(case: Case, view: View) -> torch.Tensor:
    """Run this rank's experts over a view, as a caller would in each layout; results of the view's shape."""
    if hasattr(view, "source_rows"):  # on a GPU
        return compute(case, on_host(view)).to(case.device)
    received = view.received
    first = received.first_expert
    both = np.concatenate([view.tokens, view.scales], axis=-1)
    rows = torch.from_numpy(both.reshape(view.rows, both.shape[-1]))
    kind = torch.float64 if case.config.wire == "float64" else torch.float32
    if view.kind in ("contiguous", "masked"):
        y = torch.full((view.rows, case.hidden), float("nan"), dtype=getattr(torch, case.out_dtype))  # padding: poison
        for e in range(received.experts):
            lo = int(view.offsets[e])
            hi = lo + int(view.counts[e])
            y[lo:hi] = expert(case, first + e, rows[lo:hi])
        return y.reshape(*view.shape, case.hidden)
    sums = torch.zeros((view.rows, case.hidden), dtype=kind)
    assert view.local_ids is not None
    assert view.weights is not None
    local = view.local_ids.reshape(view.rows, case.topk)
    weights = torch.from_numpy(view.weights.reshape(view.rows, case.topk).copy())
    for j in range(case.topk):
        for e in range(received.experts):
            at = torch.from_numpy(np.nonzero(local[:, j] == e)[0])
            term = expert(case, first + e, rows[at]).to(kind)
            sums[at] += term * weights[at, j, None] if case.weighted else term
    return sums.reshape(*view.shape, case.hidden)


def on_host(view: Any) -> Any:
    """A view on a GPU as one in host memory. Whatever lies in rows that do not count is poisoned."""
    sources = view.source_rows.cpu().numpy().astype(np.int64)
    counts, offsets = view.counts.cpu().numpy().astype(np.int64), view.offsets.cpu().numpy()
    tokens, scales = view.tokens.cpu().numpy(), view.scales.cpu().numpy()
    used = np.zeros(view.rows, np.bool_)
    local, weights = view.local_ids, view.weights
    if view.kind in ("contiguous", "masked"):
        for e, n in enumerate(counts):
            used[offsets[e] : offsets[e] + n] = True
            padding = tokens[offsets[e] + n : offsets[e + 1]]
            assert view.kind == "masked" or not padding.any(), "padding is not zero"
    else:
        local, weights = local.cpu().numpy(), weights.cpu().numpy()
        for s, n in enumerate(np.diff(sources)):
            at = int(sources[s]) if view.kind == "compact" else s * view.shape[1]
            used[at : at + n] = True
        local.reshape(view.rows, -1)[~used] = -1
        rows = view.expert_rows.cpu().numpy()[: counts.sum()]
        flat = local.reshape(view.rows, -1)
        for e, n in enumerate(counts):  # the lists of rows say what the local ids say
            lo = int(offsets[e])
            assert rows[lo : lo + n].tolist() == np.nonzero(flat == e)[0].tolist()
    for part in (tokens, scales):
        part.reshape(view.rows, part.shape[-1])[~used] = 0xFF
    return SimpleNamespace(
        received=view.received, kind=view.kind, shape=view.shape, rows=view.rows, tokens=tokens, scales=scales,
        counts=counts, offsets=offsets, local_ids=local, weights=weights,
    )  # fmt: skip


def view_of(case: Case, received: Any) -> View:
    made: dict[str, Callable[[], View]] = {
        "contiguous": lambda: received.contiguous(case.alignment),
        "masked": received.masked,
        "compact": received.compact,
        "rank-major": received.rank_major,
    }
    return made[case.view]()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, except that a NaN is a NaN."""
    nan = torch.isnan(a)
    if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(nan, torch.isnan(b)):
        return False
    raw_a, raw_b = torch.where(nan, 0, a), torch.where(nan, 0, b)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(raw_a.contiguous().view(words), raw_b.contiguous().view(words)) if a.numel() else True


def settle(case: Case, group: MoeGroup) -> None:
    """On a GPU, what went wrong is known when the kernels are over."""
    if case.device != "cpu":
        torch.cuda.synchronize()
        group.check()


def finish(case: Case, group: MoeGroup, step: Step, number: int) -> torch.Tensor:
    out = given(case, group.rank, number).added.clone().to(case.device) if case.accumulate else None
    found = group.combine_recv(step, out=out, accumulate=case.accumulate)
    if case.device != "cpu":
        settle(case, group)
        found = found.cpu()
    assert isinstance(found, torch.Tensor)
    return found


def run_steps(case: Case, groups: Sequence[MoeGroup], steps: int, first: int = 0, masked: Sequence[int] = ()) -> int:
    """Run steps with several ranks on this thread; returns how many results were compared. Fails on a wrong bit."""
    compared = 0
    for number in range(first, first + steps):
        under_way = [dispatch(case, group, number) for group in groups]
        received = [group.dispatch_recv(step) for group, step in zip(groups, under_way, strict=True)]
        for group, got in zip(groups, received, strict=True):
            view = view_of(case, got)
            settle(case, group)
            group.combine_send(view, compute(case, view), weighted=case.weighted)
        for group, step in zip(groups, under_way, strict=True):
            found = finish(case, group, step, number)
            assert same(found, wanted(case, group.rank, number, masked)), f"WRONG: {group!r}, step {number}, {case}"
            compared += 1
    return compared
