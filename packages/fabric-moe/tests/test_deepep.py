"""The facade of DeepEP's Buffer: what each call returns, computed once more in plain torch, as engines rely on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepep_job import EXPERTS, HIDDEN, MOST, RANKS, TOKENS, Job, send

from fabric_core import BadRange, Unsupported
from fabric_moe import StepError
from fabric_moe.deepep import Buffer
from fabric_moe.reference import owner_of


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


def test_layout(job: Job) -> None:
    per_rank, none, per_expert, inside, _ = job.buffers[0].get_dispatch_layout(job.ids[0], EXPERTS)
    assert none is None
    flat = [e for row in job.ids[0].tolist() for e in row if e >= 0]
    assert per_expert.tolist() == [flat.count(e) for e in range(EXPERTS)]
    assert per_expert.dtype == per_rank.dtype == torch.int32
    for t, row in enumerate(job.ids[0].tolist()):
        owners = {owner_of(e, EXPERTS, RANKS) for e in row if e >= 0}
        assert [r for r in range(RANKS) if inside[t, r]] == sorted(owners)
    assert per_rank.tolist() == inside.sum(0).tolist()


@pytest.mark.parametrize("worst", [0, 20])
def test_dispatch_returns_what_an_engine_expects(job: Job, worst: int) -> None:
    """vLLM's and SGLang's throughput paths: rows, local ids with -1, weights, aligned counts on the host."""
    found = job.on_all(lambda r, b: send(job, r, b, expert_alignment=4, num_worst_tokens=worst))
    for rank, (x, ids, weights, counts, handle, event) in enumerate(found):
        rows, first, held = job.rows(rank), job.first(rank), job.held(rank)
        assert len(x) == len(ids) == len(weights) == (worst or len(rows))
        assert (ids.dtype, weights.dtype, x.dtype) == (torch.int64, torch.float32, torch.bfloat16)
        expected = [0] * held
        for i, (s, t) in enumerate(rows):
            assert torch.equal(x[i], job.x[s][t])
            for j, e in enumerate(job.ids[s][t].tolist()):
                here = first <= e < first + held
                assert int(ids[i, j]) == (e - first if here else -1)
                assert float(weights[i, j]) == (float(job.weights[s][t, j]) if here else 0)
                if here:
                    expected[e - first] += 1
        assert (ids[len(rows) :] == -1).all()
        assert counts == ([] if worst else [-(-n // 4) * 4 for n in expected])
        assert handle is not None
        event.current_stream_wait()


def test_scales_travel(job: Job) -> None:
    def call(rank: int, buffer: Buffer) -> Any:
        values = job.x[rank].to(torch.float8_e4m3fn)
        return send(job, rank, buffer, x=(values, job.x[rank][:, :2].float()))

    for rank, ((values, scales), *_) in enumerate(job.on_all(call)):
        for i, (s, t) in enumerate(job.rows(rank)):
            assert torch.equal(values[i].view(torch.uint8), job.x[s][t].to(torch.float8_e4m3fn).view(torch.uint8))
            assert torch.equal(scales[i], job.x[s][t, :2].float())
        assert scales.dtype == torch.float32


def test_combine_adds_and_weighs_nothing(job: Job) -> None:
    """The sum over ranks, biases, and weights that come back; then the same handle once more."""
    bias = [(torch.ones_like(x), torch.full_like(x, 0.5)) for x in job.x]

    def call(rank: int, buffer: Buffer) -> Any:
        x, _, weights, _, handle, _ = send(job, rank, buffer)
        first = buffer.combine(x, handle, topk_weights=weights)
        again, none, *_ = buffer.dispatch(job.x[rank] * 2, handle=handle)
        assert none is None
        second = buffer.combine(again, handle, bias=bias[rank])
        return first, second

    for rank, ((summed, weights, _), (twice, none, _)) in enumerate(job.on_all(call)):
        for t, row in enumerate(job.ids[rank].tolist()):
            ranks = len({owner_of(e, EXPERTS, RANKS) for e in row if e >= 0})
            total = torch.zeros(HIDDEN)
            for _ in range(ranks):
                total = total + job.x[rank][t].float()
            assert torch.equal(summed[t], total.bfloat16())
            expected = [w if e >= 0 else 0.0 for e, w in zip(row, job.weights[rank][t].tolist(), strict=True)]
            assert weights[t].tolist() == expected
            doubled = torch.zeros(HIDDEN)
            for _ in range(ranks):
                doubled = doubled + 2 * job.x[rank][t].float()
            assert torch.equal(twice[t], ((doubled + 1).bfloat16().float() + 0.5).bfloat16())
        assert none is None
        assert len(summed) == TOKENS[rank]


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_low_latency(job: Job, use_fp8: bool, hooked: bool) -> None:
    """Masked rows and counts, as masked GEMMs of vLLM and SGLang take them, and a weighted sum."""
    stats = [torch.zeros(job.held(r), dtype=torch.int32) for r in range(RANKS)]

    def call(rank: int, buffer: Buffer) -> Any:
        x, counts, handle, _, hook = buffer.low_latency_dispatch(
            job.x[rank], job.ids[rank], MOST, EXPERTS, stats[rank], use_fp8=use_fp8, return_recv_hook=hooked
        )
        if hooked:
            assert not counts.any()
            with pytest.raises(StepError, match="hook"):
                buffer.low_latency_combine(torch.zeros(1), job.ids[rank], job.weights[rank], handle)
            hook()
        values = x[0].float() * x[1].repeat_interleave(128, dim=2) if use_fp8 else x.float()
        made = (values * (1 + torch.arange(job.held(rank)))[:, None, None]).bfloat16()
        out, _, hook = buffer.low_latency_combine(
            made, job.ids[rank], job.weights[rank], handle, return_recv_hook=hooked
        )
        hook()
        return x, counts, made, out

    found = job.on_all(call)
    for rank, (x, counts, _, _) in enumerate(found):
        first, held = job.first(rank), job.held(rank)
        values = x[0] if use_fp8 else x
        assert tuple(values.shape) == (held, RANKS * MOST, HIDDEN)
        assert counts.dtype == torch.int32
        assert torch.equal(stats[rank], counts)
        if use_fp8:
            assert tuple(x[1].shape) == (held, RANKS * MOST, HIDDEN // 128)
            assert x[1].stride(1) == 1
        for e in range(held):
            rows = [(s, t) for s in range(RANKS) for t in range(TOKENS[s]) if first + e in job.ids[s][t].tolist()]
            assert int(counts[e]) == len(rows)
            for i, (s, t) in enumerate(rows):
                got = values[e, i].float() * (x[1][e, i].repeat_interleave(128) if use_fp8 else 1)
                torch.testing.assert_close(got, job.x[s][t].float(), rtol=0.07 if use_fp8 else 0, atol=1e-3)
            assert not values[e, len(rows) :].float().any()
    for rank, (*_, out) in enumerate(found):
        for t, row in enumerate(job.ids[rank].tolist()):
            expected = torch.zeros(HIDDEN)
            for e, w in zip(row, job.weights[rank][t].tolist(), strict=True):
                if e >= 0:
                    local = e - job.first(owner_of(e, EXPERTS, RANKS))
                    expected += w * (1 + local) * job.x[rank][t].float()
            torch.testing.assert_close(out[t].float(), expected, rtol=0.08 if use_fp8 else 0.02, atol=0.08)


def test_calls_that_make_no_sense(job: Job) -> None:
    buffer = job.buffers[0]
    with pytest.raises(BadRange, match="needs topk_idx"):
        buffer.dispatch(job.x[0])
    with pytest.raises(Unsupported, match="ue8m0"):
        buffer.low_latency_dispatch(job.x[0], job.ids[0], MOST, EXPERTS, use_ue8m0=True)
    with pytest.raises(BadRange, match="multiple of 128"):
        buffer.low_latency_dispatch(job.x[0][:, :100], job.ids[0], MOST, EXPERTS)

    def call(rank: int, buffer: Buffer) -> None:
        with pytest.raises(BadRange, match="num_worst_tokens is 1"):
            send(job, rank, buffer, num_worst_tokens=1)

    job.on_all(call)
