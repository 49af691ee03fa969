"""The facade of DeepEP's Buffer in other orders: without a combine, with two, and what engines call around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepep_job import EXPERTS, HIDDEN, MOST, RANKS, Job, send

from fabric_core import BadRange
from fabric_moe import StepError
from fabric_moe.deepep import Buffer
from fabric_moe.reference import owner_of


@pytest.fixture
def job() -> Any:
    made = Job()
    yield made
    made.close()


def times(job: Job, rank: int) -> torch.Tensor:
    """Ranks that each token went to: what combine adds up when experts return the tokens."""
    ids = job.ids[rank].tolist()
    return torch.tensor([len({owner_of(e, EXPERTS, RANKS) for e in row if e >= 0}) for row in ids]).reshape(-1, 1)


def test_dispatches_without_a_combine(job: Job) -> None:
    """As in a benchmark, or where only the layout was wanted: more of them than there is memory for."""

    def call(rank: int, buffer: Buffer) -> Any:
        found = [send(job, rank, buffer) for _ in range(5)]
        return found, buffer.combine(found[1][0], found[1][4])[0], buffer.combine(found[4][0], found[4][4])[0]

    for rank, (found, early, late) in enumerate(job.on_all(call)):
        wanted = (job.x[rank].float() * times(job, rank)).bfloat16()
        assert all(torch.equal(one[0], found[0][0]) for one in found)
        assert torch.equal(early, wanted)  # the second one's step was over already
        assert torch.equal(late, wanted)


def test_a_handle_is_combined_with_twice(job: Job) -> None:
    def call(rank: int, buffer: Buffer) -> Any:
        x, _, _, _, handle, _ = send(job, rank, buffer, x=(job.x[rank], job.x[rank][:, :2].float()))
        return [buffer.combine(x[0] * n, handle)[0] for n in (1, 2, 3)]

    for rank, found in enumerate(job.on_all(call)):
        for n, out in enumerate(found, 1):
            assert torch.equal(out, (job.x[rank] * n).float().mul(times(job, rank)).bfloat16())


def test_low_latency_results_that_nobody_combines(job: Job) -> None:
    def call(rank: int, buffer: Buffer) -> Any:
        ours = (job.x[rank], job.ids[rank], MOST, EXPERTS)
        for _ in range(4):
            x, counts, handle, _, _ = buffer.low_latency_dispatch(*ours, use_fp8=False)
        made = buffer.get_next_low_latency_combine_buffer(handle)
        made.copy_(x)
        out = [
            buffer.low_latency_combine(made, job.ids[rank], job.weights[rank], handle, zero_copy=True)[0] for _ in "ab"
        ]
        return x, counts, out

    for rank, (x, counts, (out, again)) in enumerate(job.on_all(call)):
        assert tuple(x.shape) == (job.held(rank), RANKS * MOST, HIDDEN)
        assert counts.sum() > 0
        weights = torch.where(job.ids[rank] >= 0, job.weights[rank], 0).sum(1, keepdim=True)
        torch.testing.assert_close(out.float(), job.x[rank].float() * weights, rtol=0.02, atol=0.05)
        assert torch.equal(out, again)


def test_sums_that_have_nowhere_to_go_are_refused_before_anything_is_sent(job: Job) -> None:
    """One rank's wrong argument must not leave the others waiting for it."""

    def call(rank: int, buffer: Buffer) -> Any:
        x, _, handle, _, _ = buffer.low_latency_dispatch(job.x[rank], job.ids[rank], MOST, EXPERTS, use_fp8=False)
        ours = (x, job.ids[rank], job.weights[rank], handle)
        if rank == 0:
            with pytest.raises(BadRange, match="contiguous"):
                buffer.low_latency_combine(*ours, out=torch.empty((HIDDEN, len(job.x[rank])), dtype=x.dtype).T)
        low = buffer.low_latency_combine(*ours)[0]
        rows, _, _, _, other, _ = send(job, rank, buffer)
        if rank == 0:
            with pytest.raises(BadRange, match=r"bytes|rows|wide|out"):
                buffer.combine(rows, other, bias=torch.zeros((len(job.x[rank]), HIDDEN + 2), dtype=torch.bfloat16))
        return low, buffer.combine(rows, other)[0]

    for rank, (low, high) in enumerate(job.on_all(call)):
        weights = torch.where(job.ids[rank] >= 0, job.weights[rank], 0).sum(1, keepdim=True)
        torch.testing.assert_close(low.float(), job.x[rank].float() * weights, rtol=0.02, atol=0.05)
        assert torch.equal(high, job.x[rank].float().mul(times(job, rank)).bfloat16())


def test_a_hook_that_was_never_called_is_told(job: Job) -> None:
    """No corruption and no hang: the third dispatch finds no memory."""

    def call(rank: int, buffer: Buffer) -> None:
        ours = (job.x[rank], job.ids[rank], MOST, EXPERTS)
        hooks = [buffer.low_latency_dispatch(*ours, return_recv_hook=True)[-1] for _ in range(2)]
        with pytest.raises(StepError, match="not over"):
            buffer.low_latency_dispatch(*ours, return_recv_hook=True)
        for hook in hooks:
            hook()
        buffer.low_latency_dispatch(*ours)

    job.on_all(call)


def test_ids_that_are_out_of_range(job: Job) -> None:
    with pytest.raises(BadRange, match=f"from 0 to 9: experts go from 0 to {EXPERTS - 1}"):
        job.buffers[0].get_dispatch_layout(torch.tensor([[0, 9]]), EXPERTS)


def test_what_engines_call_around_it(job: Job) -> None:
    buffer = job.buffers[0]
    Buffer.set_num_sms(24)
    with buffer.capture() as event:
        event.current_stream_wait()
    assert event.event is None
    buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 64, 256) > 128 * 7168
    assert Buffer.get_dispatch_config(3) is Buffer.get_combine_config(3) is None
    buffer.destroy()
    buffer.destroy()
    with pytest.raises(StepError, match="the Buffer of rank 0 was destroyed"):
        send(job, 0, buffer)
