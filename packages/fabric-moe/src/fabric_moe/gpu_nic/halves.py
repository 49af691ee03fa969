"""The four halves on a GPU whose tokens travel through the engine: arguments are looked at here, kernels are queued.

Nothing here waits, and nothing asks the GPU, so all of it can be captured into a CUDA graph: which step it is, the
kernels know themselves, and the proxy hears it from them. All halves of a group belong on one stream, or on streams
that are ordered by events.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from fabric_core import BadRange
from fabric_moe.cuda.arguments import here, rows_of, tokens_of
from fabric_moe.cuda.views import KINDS, GpuView
from fabric_moe.dtypes import bits_of, torch_dtype, type_name
from fabric_moe.errors import StepError
from fabric_moe.gpu_nic.arguments import Back, Recv, Send, Sum
from fabric_moe.gpu_nic.generation import NicGeneration
from fabric_moe.gpu_nic.views import NicReceived
from fabric_moe.step import DONE, RECEIVED, RETURNED, SENT

if TYPE_CHECKING:
    from fabric_moe.group import MoeGroup

__all__ = ["NicStep", "combine_recv", "combine_send", "discard", "dispatch_recv", "dispatch_send", "lay_out"]

_THREADS, _WORKERS = 512, 256  # as in words.cuh
_BLOCKS_EACH = 4  # per multiprocessor
_DISCARDED = 16
_SHARED = 40 << 10  # beyond, a kernel's own words may not fit below 48 KiB: with more than that, the limit is raised


class NicStep:
    """What `dispatch_send` returns here. The other three halves take it."""

    def __init__(self, number: int, slot: int, generation: NicGeneration, tokens: int, keep: tuple[Any, ...]) -> None:
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

    def __repr__(self) -> str:
        return f"<Step {self.number}: {self.state}>"


def _launch(
    gen: NicGeneration, name: str, arguments: ctypes.Structure, blocks: int = 1, threads: int = _THREADS,
    shared: int = 0,
) -> None:  # fmt: skip
    if shared > _SHARED:
        shared = max(shared, (48 << 10) + 16)
    gen.kernels[f"moe_nic_{name}"].launch(blocks, threads, shared, gen.stream(), arguments)


def _blocks(gen: NicGeneration, rows: int) -> int:
    return max(1, min(_BLOCKS_EACH * gen.device.multiprocessors, rows))


def dispatch_send(group: MoeGroup, x: Any, ids: Any, weights: Any, scales: Any, live: Any) -> NicStep:
    """See MoeGroup.dispatch_send."""
    import torch

    gen = group.generation
    assert isinstance(gen, NicGeneration)
    x, ids, weights, scales, live = tokens_of(gen, x, ids, weights, scales, live)
    tokens, given = int(ids.shape[0]), int(ids.shape[1])
    number, slot = group.free_slot()

    def at(tensor: Any) -> int:
        return 0 if tensor is None else int(tensor.data_ptr())

    arguments = Send(
        gen.nic(slot), at(x), at(scales), at(ids), at(weights), at(live), tokens, given, ids.dtype == torch.int64
    )
    step = NicStep(number, slot, gen, tokens, (x, scales, ids, weights, live))
    try:
        _launch(gen, "count", arguments, shared=gen.layout.count_shared())
        _launch(gen, "pack", arguments, _blocks(gen, tokens), _WORKERS)
        group.steps[slot] = step
        group.next_step += 1
    except BaseException as error:  # Ctrl-C, say: the others may have been told of rows that never come
        group.broken = StepError(
            f"rank {gen.rank}, step {number}: dispatch_send ended half-way with {error!r}; regroup() with all ranks, "
            "or close()"
        )
        if gen.report.proxy is not None:
            gen.report.proxy.note(gen.rank)
        raise
    return step


def dispatch_recv(step: NicStep) -> NicReceived:
    """See MoeGroup.dispatch_recv. The kernel that waits comes with the view: only then is it known where rows go."""
    step.must_be(SENT, "dispatch_recv")
    step.state = RECEIVED
    return NicReceived(step)  # type: ignore[arg-type]


def lay_out(view: GpuView, capacity: int, alignment: int) -> None:
    """Queue the kernels that wait for the rows and lay them out as the view says."""
    step: Any = view.step
    gen, held = step.generation, view.received.experts
    if alignment * max(1, held) >= 1 << 31:
        raise BadRange(f"alignment={alignment}: the padding of {held} experts is counted by 31 bits; lower it")

    def at(tensor: Any) -> int:
        return 0 if tensor is None else int(tensor.data_ptr())

    arguments = Recv(
        gen.nic(step.slot), at(view.tokens), at(view.scales), at(view.counts), at(view.offsets), at(view.source_rows),
        at(view.plan), at(view.local_ids), at(view.weights), at(view.expert_rows), capacity, alignment,
        KINDS[view.kind], held,
    )  # fmt: skip
    _launch(gen, "wait_rows", arguments, shared=gen.layout.arrive_shared(held))
    _launch(gen, "lay_out", arguments, _blocks(gen, max(view.received.most_rows, held * alignment)), _WORKERS)
    step.view = view


def combine_send(view: GpuView, y: Any, weighted: bool, dtype: str | None) -> None:
    """See MoeGroup.combine_send."""
    step: Any = view.step
    step.must_be(RECEIVED, "combine_send")
    gen = step.generation
    y = here(gen, y, "y")
    name = dtype or type_name(y)
    if f"moe_nic_combine_{name}" not in gen.kernels:
        raise BadRange(f"y is of {name}: bfloat16, float16 and float32 are summed on GPUs")
    hidden = gen.config.hidden
    if y.dim() == 3 and y.shape[2] == hidden:
        y = y.reshape(y.shape[0] * y.shape[1], hidden)
    y = rows_of(gen, y, "y", hidden * bits_of(name) // 8, 0, name)
    if len(y) != view.rows:
        raise BadRange(f"y has {len(y)} rows, the view that it belongs to has {view.rows}")
    once = view.kind in ("compact", "rank-major")  # its caller has summed a row's experts
    arguments = Back(gen.nic(step.slot), y.data_ptr(), view.plan.data_ptr(), weighted and not once, 0)
    _launch(gen, f"combine_{name}", arguments, _blocks(gen, view.received.most_rows), _WORKERS)
    step.keep = (*step.keep, y)
    step.state = RETURNED


def discard(step: NicStep) -> None:
    """See MoeGroup.discard."""
    step.must_be(RECEIVED, "discard")
    gen = step.generation
    if step.view is None:  # the tokens must have come before their senders may write again
        NicReceived(step).compact()  # type: ignore[arg-type]
    view = step.view
    assert view is not None
    _launch(gen, "combine_bfloat16", Back(gen.nic(step.slot), 0, view.plan.data_ptr(), 0, _DISCARDED), 1, _WORKERS)
    step.state = RETURNED


def combine_recv(step: NicStep, out: Any, accumulate: bool) -> Any:
    """See MoeGroup.combine_recv."""
    import torch

    step.must_be(RETURNED, "combine_recv")
    gen, config = step.generation, step.generation.config
    wanted, kind = (step.tokens, config.hidden), torch_dtype(config.out_dtype)
    if out is None:
        if accumulate:
            raise BadRange("accumulate=True needs out=: the rows to add to")
        out = torch.empty(wanted, dtype=kind, device=gen.place)
    where: Any = gen
    here(where, out, "out")
    if tuple(out.shape) != wanted or out.dtype != kind or not out.is_contiguous():
        raise BadRange(
            f"out is {out.dtype} of shape {tuple(out.shape)}: {config.out_dtype} of shape {wanted}, contiguous, is "
            "wanted"
        )
    if out.data_ptr() % 16:
        raise BadRange("out= must begin at a multiple of 16 bytes")
    arguments = Sum(gen.nic(step.slot), out.data_ptr(), step.tokens, accumulate)
    _launch(gen, "wait_sums", arguments)
    _launch(gen, "combine_recv", arguments, _blocks(gen, step.tokens), _WORKERS)
    step.state = DONE
    step.view = None
    step.keep = ()  # torch keeps memory for the stream that used it
    return out
