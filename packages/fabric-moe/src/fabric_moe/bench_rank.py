"""One rank of `fabric moe bench`, a process of its own. Needs torch.

Every step is chained to the one before. A sample of tokens is compared with the reference, bit for bit, outside of what
is timed.
"""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from fabric_core import TransferEngine
from fabric_core.bootstrap import open_board
from fabric_moe.bench_order import Order
from fabric_moe.config import MoeConfig
from fabric_moe.gate import Limit, draw
from fabric_moe.generation import Generation
from fabric_moe.group import MoeGroup
from fabric_moe.reference import reference
from fabric_moe.views import View

__all__ = ["main"]

_SAMPLE = 8  #: tokens that are compared in a step that is compared at all
_LOOKS = 16  #: steps that are compared


def _given(config: MoeConfig, gate: Limit | None, seed: int, rank: int, step: int) -> tuple[Any, Any, Any, Any]:
    """Tokens, experts, weights and scales of a rank in a step; experts are drawn without repetition."""
    import torch

    rng = np.random.default_rng([seed, rank, step])
    t = config.max_tokens
    x = torch.from_numpy(rng.standard_normal((t, config.hidden), np.float32)).to(getattr(torch, config.dtype))
    ids = draw(rng, t, config.experts, config.topk, gate)
    weights = torch.from_numpy(rng.random((t, config.topk), np.float32))
    scales = torch.from_numpy(rng.integers(0, 256, (t, config.scale_bytes), np.uint8)) if config.scale_bytes else None
    return x, torch.from_numpy(ids.astype(np.int32)), weights, scales


def _expert(number: int, x: Any, out: str) -> Any:
    import torch

    return (x.to(torch.float32) * (1 + number % 5)).to(getattr(torch, out))


def _experts(config: MoeConfig, view: View) -> Any:
    import torch

    x = view.tensor()
    y = torch.empty((view.rows, config.hidden), dtype=getattr(torch, config.out_dtype))
    for e in range(view.received.experts):
        lo, hi = int(view.offsets[e]), int(view.offsets[e] + view.counts[e])
        y[lo:hi] = _expert(view.received.first_expert + e, x[lo:hi], config.out_dtype)
    return y


def _wrong(config: MoeConfig, given: tuple[Any, Any, Any, Any], found: Any, step: int) -> int:
    """Tokens of a sample whose result is not, bit for bit, what the reference has."""
    import torch

    x, ids, weights, _ = given
    some = torch.from_numpy(np.random.default_rng(step).choice(len(x), min(_SAMPLE, len(x)), replace=False))
    wanted = reference(
        [x[some]], [ids[some]], [weights[some]], lambda e, rows: _expert(e, rows, config.out_dtype),
        ranks=config.ranks, experts=config.experts, hidden=config.hidden, out_dtype=config.out_dtype,
        wire_dtype=config.wire,
    )[0]  # fmt: skip
    equal = (wanted.view(torch.uint8) == found[some].contiguous().view(torch.uint8)).all(dim=1)
    return int((~equal).sum())


def _run(group: MoeGroup, config: MoeConfig, order: Order) -> dict[str, Any]:
    times: list[list[float]] = []
    wrong = compared = sent_rows = late_rows = 0
    warm, steps = order.warmup, order.steps
    clock = time.perf_counter
    # made before: not what is measured
    kept = [_given(config, order.gate, order.seed, group.rank, i) for i in range(4)]
    look = max(1, steps // _LOOKS)
    for number in range(warm + steps):
        given = kept[number % len(kept)]
        marks = [clock()]
        step = group.dispatch_send(given[0], given[1], given[2], scales=given[3])
        marks.append(clock())
        received = group.dispatch_recv(step)
        marks.append(clock())
        view = received.contiguous()
        marks.append(clock())
        y = _experts(config, view)
        before = clock()
        group.combine_send(view, y)
        marks.append(marks[-1] + clock() - before)  # without the experts
        before = clock()
        found = group.combine_recv(step)
        marks.append(marks[-1] + clock() - before)
        if number >= warm:
            times.append(np.diff(marks).tolist())
            sent_rows += len(step.route.token)
            assert step.places is not None
            late_rows += int((step.route.counts - np.minimum(step.route.counts, step.places.private[group.rank])).sum())
        if number % look == 0:
            wrong += _wrong(config, given, found, number)
            compared += min(_SAMPLE, config.max_tokens)
    return {
        "rank": group.rank, "times": times, "wrong": wrong, "compared": compared, "rows": sent_rows / steps,
        "late_rows": late_rows / steps, "copy_bytes_per_s": _copy_rate(), "private": group.window.rows,
        "in_c": group.generation.proxy is not None,
    }  # fmt: skip


def _copy_rate() -> float:
    """Bytes that this process copies in a second, one core, blocks beyond the caches: the limit that `local` meets."""
    a = np.ones(32 << 20, np.uint8)
    b = np.empty_like(a)
    best = 1e9
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(b, a)
        best = min(best, time.perf_counter() - began)
    return len(a) / best


def main(order: Order, rank: int, pipe: Connection) -> None:
    """Join, run, send the figures, and stay until all ranks are done. An error is sent as its text."""
    import torch

    torch.set_num_threads(1)
    Generation.in_c = order.in_c
    try:
        with (
            TransferEngine.open(backend=order.backend) as engine,
            MoeGroup.open(engine, order.config, rank, open_board(order.board), timeout=120.0) as group,
        ):
            pipe.send(_run(group, order.config, order))
            with contextlib.suppress(EOFError):
                pipe.recv()
    except Exception as error:  # whatever it is, the other process has to say it
        pipe.send(f"{type(error).__name__}: {error}")
