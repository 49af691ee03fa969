"""The four halves on a GPU: arguments are looked at here, the work is queued on the current stream of torch.

Nothing here waits, and nothing asks the GPU, so all of it can be captured into a CUDA graph. Which step it is, the
kernels know themselves. All halves of a group belong on one stream, or on streams that are ordered by events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric_core import BadRange
from fabric_moe.cuda.arguments import Back, Recv, Send, Sum, here, rows_of, tokens_of
from fabric_moe.cuda.blocks import THREADS, each_of, recv_grid, send_grid, sums_grid
from fabric_moe.cuda.generation import GpuGeneration
from fabric_moe.cuda.views import KINDS, GpuReceived, GpuView
from fabric_moe.dtypes import bits_of, torch_dtype, type_name
from fabric_moe.errors import StepError
from fabric_moe.step import DONE, RECEIVED, RETURNED, SENT

if TYPE_CHECKING:
    from fabric_moe.group import MoeGroup

__all__ = ["GpuStep", "combine_recv", "combine_send", "discard", "dispatch_send", "lay_out"]

_DISCARDED = 16


class _Bytes:
    """Memory that torch may look at, by the interface that it knows."""

    def __init__(self, at: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "data": (at, False), "shape": shape, "strides": strides, "typestr": "|u1", "version": 3,
        }  # fmt: skip


class GpuStep:
    """What `dispatch_send` returns for tokens on a GPU. The other three halves take it."""

    def __init__(self, number: int, slot: int, generation: GpuGeneration, tokens: int, keep: tuple[Any, ...]) -> None:
        self.number = number
        self.slot = slot
        self.generation = generation
        self.tokens = tokens  #: rows of the result
        self.state = SENT
        self.view: GpuView | None = None
        self.keep = keep  #: tensors that queued kernels read

    def must_be(self, state: str, call: str) -> None:
        """Raise StepError if the step is not in the state that a call needs."""
        if self.state != state:
            raise StepError(f"{call}: step {self.number} is not ready for it: {self.state}; wanted is: {state}")

    def slabs(self) -> tuple[Any, Any]:
        """Return the rows where they arrived: tokens and scales, [ranks, max_tokens, bytes], strided."""
        import torch

        gen = self.generation
        config, layout = gen.config, gen.layout
        at, where = gen.rows_at(self.slot), torch.device("cuda", gen.device.number)
        strides = (config.max_tokens * layout.row_bytes, layout.row_bytes, 1)
        shape = (config.ranks, config.max_tokens)
        tokens = torch.as_tensor(_Bytes(at, (*shape, config.token_bytes), strides), device=where)
        if not config.scale_bytes:
            return tokens, torch.empty((*shape, 0), dtype=torch.uint8, device=where)
        return tokens, torch.as_tensor(
            _Bytes(at + layout.scale_at, (*shape, config.scale_bytes), strides), device=where
        )

    def __repr__(self) -> str:
        return f"<Step {self.number}: {self.state}>"


def _stream(gen: GpuGeneration) -> int:
    import torch

    return int(torch.cuda.current_stream(gen.device.number).cuda_stream)


def dispatch_send(group: MoeGroup, x: Any, ids: Any, weights: Any, scales: Any, live: Any) -> GpuStep:
    """See MoeGroup.dispatch_send."""
    import torch

    assert group.gpu is not None
    gen, config = group.gpu, group.config
    x, ids, weights, scales, live = tokens_of(gen, x, ids, weights, scales, live)
    tokens, given = int(ids.shape[0]), int(ids.shape[1])
    number, slot = group.free_slot()
    kernel, blocks, threads, each, split = send_grid(gen, tokens)
    arguments = Send(
        gen.common(slot), x.data_ptr(), scales.data_ptr() if config.scale_bytes else 0, ids.data_ptr(),
        0 if weights is None else weights.data_ptr(), 0 if live is None else live.data_ptr(), tokens, given,
        ids.dtype == torch.int64, each, split,
    )  # fmt: skip
    step = GpuStep(number, slot, gen, tokens, (x, scales, ids, weights, live))
    gen.kernels[kernel].launch(blocks, threads, gen.layout.send_shared(each), _stream(gen), arguments)
    group.steps[slot] = step
    group.next_step += 1
    return step


def dispatch_recv(step: GpuStep) -> GpuReceived:
    """See MoeGroup.dispatch_recv. The kernel that waits comes with the view: only then is it known where rows go."""
    step.must_be(SENT, "dispatch_recv")
    step.state = RECEIVED
    return GpuReceived(step)


def lay_out(view: GpuView, capacity: int, alignment: int) -> None:
    """Queue the kernel that waits for the rows and lays them out as the view says."""
    step = view.step
    gen, held = step.generation, view.received.experts

    def at(tensor: Any) -> int:
        return 0 if tensor is None else int(tensor.data_ptr())

    arguments = Recv(
        gen.common(step.slot), at(view.tokens), at(view.scales), at(view.counts), at(view.offsets),
        at(view.source_rows), at(view.plan), at(view.local_ids), at(view.weights), at(view.expert_rows), capacity,
        alignment, KINDS[view.kind], held,
    )  # fmt: skip
    rows = view.received.most_rows
    if rows * gen.config.topk + held * alignment >= 1 << 32:
        raise BadRange(f"alignment={alignment}: the rows of {held} experts would not be counted by 32 bits; lower it")
    gen.kernels["moe_dispatch_recv"].launch(
        *recv_grid(gen, rows), gen.layout.recv_shared(held), _stream(gen), arguments
    )  # fmt: skip
    step.view = view


def combine_send(view: GpuView, y: Any, weighted: bool, dtype: str | None) -> None:
    """See MoeGroup.combine_send."""
    step = view.step
    step.must_be(RECEIVED, "combine_send")
    gen = step.generation
    y = here(gen, y, "y")
    name = dtype or type_name(y)
    kernel = gen.kernels.get(f"moe_combine_send_{name}")
    if kernel is None:
        raise BadRange(f"y is of {name}: bfloat16, float16 and float32 are summed on GPUs")
    hidden = gen.config.hidden
    if y.dim() == 3 and y.shape[2] == hidden:
        y = y.reshape(y.shape[0] * y.shape[1], hidden)
    y = rows_of(gen, y, "y", hidden * bits_of(name) // 8, 0, name)
    if len(y) != view.rows:
        raise BadRange(f"y has {len(y)} rows, the view that it belongs to has {view.rows}")
    once = view.kind in ("compact", "rank-major")  # its caller has summed a row's experts
    arguments = Back(
        gen.common(step.slot), y.data_ptr(), view.plan.data_ptr(), view.source_rows.data_ptr(), weighted and not once, 0
    )
    kernel.launch(sums_grid(gen, view.received.most_rows), THREADS, 0, _stream(gen), arguments)
    step.keep = (*step.keep, y)
    step.state = RETURNED


def discard(step: GpuStep) -> None:
    """See MoeGroup.discard."""
    step.must_be(RECEIVED, "discard")
    gen = step.generation
    if step.view is None:  # the tokens must have come before their senders may write again
        GpuReceived(step).rank_major()
    view = step.view
    assert view is not None
    arguments = Back(gen.common(step.slot), 0, view.plan.data_ptr(), view.source_rows.data_ptr(), 0, _DISCARDED)
    gen.kernels["moe_combine_send_bfloat16"].launch(1, THREADS, 0, _stream(gen), arguments)
    step.state = RETURNED


def combine_recv(step: GpuStep, out: Any, accumulate: bool) -> Any:
    """See MoeGroup.combine_recv."""
    import torch

    step.must_be(RETURNED, "combine_recv")
    gen, config = step.generation, step.generation.config
    if out is None:
        if accumulate:
            raise BadRange("accumulate=True needs out=: the rows to add to")
        out = torch.empty(
            (step.tokens, config.hidden), dtype=torch_dtype(config.out_dtype),
            device=torch.device("cuda", gen.device.number),
        )  # fmt: skip
    here(gen, out, "out")
    wanted = (step.tokens, config.hidden)
    if tuple(out.shape) != wanted or out.dtype != torch_dtype(config.out_dtype) or not out.is_contiguous():
        raise BadRange(
            f"out is {out.dtype} of shape {tuple(out.shape)}: {config.out_dtype} of shape {wanted}, contiguous, is "
            "wanted"
        )
    if out.data_ptr() % 16:
        raise BadRange("out= must begin at a multiple of 16 bytes")
    each = each_of(gen, step.tokens)
    parts = 2 if each == 1 and step.tokens <= gen.device.multiprocessors else 1
    arguments = Sum(gen.common(step.slot), out.data_ptr(), step.tokens, each, parts, accumulate)
    blocks = max(1, -(-step.tokens // each)) * parts
    gen.kernels["moe_combine_recv"].launch(blocks, THREADS, 0, _stream(gen), arguments)
    step.state = DONE
    step.view = None
    step.keep = ()  # torch keeps memory for the stream that used it
    return out
