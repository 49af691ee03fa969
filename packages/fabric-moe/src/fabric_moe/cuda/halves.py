"""The four halves on a GPU: arguments are looked at here, the work is queued on the current stream of torch.

Nothing here waits, and nothing asks the GPU, so all of it can be captured into a CUDA graph. Which step it is, the
kernels know themselves. All halves of a group belong on one stream, or on streams that are ordered by events.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from fabric_core import BadRange
from fabric_moe.cuda.generation import Common, GpuGeneration
from fabric_moe.cuda.views import KINDS, GpuReceived, GpuView
from fabric_moe.dtypes import bits_of, is_torch, torch_dtype
from fabric_moe.errors import StepError
from fabric_moe.step import DONE, RECEIVED, RETURNED, SENT

if TYPE_CHECKING:
    from fabric_moe.group import MoeGroup

__all__ = ["GpuStep", "combine_recv", "combine_send", "discard", "dispatch_send", "lay_out"]

_THREADS, _WARPS = 512, 16  # as in common.cuh
_BLOCKS_EACH = 2  # per multiprocessor
_DISCARDED = 16


class _Send(ctypes.Structure):
    _fields_ = (
        ("c", Common),
        ("x", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("ids", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("live", ctypes.c_uint64),
        ("tokens", ctypes.c_int32),
        ("given", ctypes.c_int32),
        ("wide", ctypes.c_int32),
        ("each", ctypes.c_int32),
    )


class _Recv(ctypes.Structure):
    _fields_ = (
        ("c", Common),
        ("tokens", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("offsets", ctypes.c_uint64),
        ("table", ctypes.c_uint64),
        ("local_ids", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("expert_rows", ctypes.c_uint64),
        ("capacity", ctypes.c_int64),
        ("alignment", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("held", ctypes.c_int32),
    )


class _Back(ctypes.Structure):
    _fields_ = (
        ("c", Common),
        ("y", ctypes.c_uint64),
        ("table", ctypes.c_uint64),
        ("weighted", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("held", ctypes.c_int32),
        ("flags", ctypes.c_int32),
    )


class _Sum(ctypes.Structure):
    _fields_ = (
        ("c", Common),
        ("out", ctypes.c_uint64),
        ("tokens", ctypes.c_int32),
        ("each", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("accumulate", ctypes.c_int32),
    )


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


def _rows(gen: GpuGeneration, x: Any, what: str, nbytes: int, tokens: int) -> Any:
    """Return a contiguous tensor on the group's GPU whose rows have `nbytes`. Raises BadRange."""
    x = _here(gen, x, what)
    flat = x.reshape(x.shape[0], -1) if x.dim() > 2 else x
    if flat.dim() != 2 or (got := int(flat.shape[1]) * int(flat.element_size())) != nbytes:
        raise BadRange(
            f"{what} has shape {tuple(x.shape)} of {x.dtype}: rows of {nbytes} bytes are configured"
            + (f", these have {got}" if flat.dim() == 2 else "")
        )
    if len(flat) < tokens:
        raise BadRange(f"{what} has {len(flat)} rows, topk_ids has {tokens} tokens")
    flat = flat.contiguous()
    return flat if flat.data_ptr() % 16 == 0 else flat.clone()


def _here(gen: GpuGeneration, x: Any, what: str) -> Any:
    where = f"cuda:{gen.device.number}"
    if not is_torch(x) or str(x.device) != where:
        found = str(x.device) if is_torch(x) else type(x).__name__
        raise BadRange(f"{what} is on {found}: this group was opened for {where}; give a tensor that is there")
    return x.detach()


def _each(gen: GpuGeneration, tokens: int) -> int:
    """Return how many tokens a block takes: a power of two, so that all blocks run at once."""
    blocks, each = _BLOCKS_EACH * gen.device.multiprocessors, 1
    while -(-tokens // each) > blocks:
        each *= 2
    return each


def _grid(gen: GpuGeneration, rows: int) -> int:
    """Return the blocks for at most so many rows."""
    return max(1, min(_BLOCKS_EACH * gen.device.multiprocessors, rows))


def _stream(gen: GpuGeneration) -> int:
    import torch

    return int(torch.cuda.current_stream(gen.device.number).cuda_stream)


def dispatch_send(group: MoeGroup, x: Any, ids: Any, weights: Any, scales: Any, live: Any) -> GpuStep:
    """See MoeGroup.dispatch_send."""
    import torch

    gen = group.gpu
    assert gen is not None
    config = gen.config
    ids = _here(gen, ids, "topk_ids")
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise BadRange(f"topk_ids is {ids.dtype} of shape {tuple(ids.shape)}: int64 or int32 [tokens, topk] are wanted")
    tokens, given = int(ids.shape[0]), int(ids.shape[1])
    if tokens > config.max_tokens:
        raise BadRange(f"{tokens} tokens in one step, max_tokens is {config.max_tokens}: split them, or raise it")
    if given > config.topk:
        raise BadRange(f"{given} experts a token, topk is {config.topk}")
    x = _rows(gen, x, "x", config.token_bytes, tokens)
    if scales is not None and not config.scale_bytes:
        raise StepError("scales were given, but the group was made with scale_bytes=0")
    if config.scale_bytes:
        if scales is None:
            raise BadRange(f"scales=None: the group was made with {config.scale_bytes} bytes of it for each token")
        scales = _rows(gen, scales, "scales", config.scale_bytes, tokens)
    if weights is not None:
        weights = _here(gen, weights, "topk_weights")
        if weights.shape != ids.shape:
            raise BadRange(f"topk_weights has shape {tuple(weights.shape)}: numbers of shape {tuple(ids.shape)}")
        weights = weights.float().contiguous()
    if isinstance(live, int):
        if not 0 <= live <= tokens:
            raise BadRange(f"live={live!r}: topk_ids has {tokens} tokens")
        live = torch.full((1,), live, dtype=torch.int32, device=ids.device)
    elif live is not None:
        live = _here(gen, live, "live")
        if live.numel() != 1 or live.dtype != torch.int32:
            raise BadRange(f"live is {live.dtype} of shape {tuple(live.shape)}: one int32 is wanted")
    ids = ids.contiguous()
    number, slot = group.free_slot()
    each = _each(gen, tokens)
    arguments = _Send(
        gen.common(slot), x.data_ptr(), scales.data_ptr() if config.scale_bytes else 0, ids.data_ptr(),
        0 if weights is None else weights.data_ptr(), 0 if live is None else live.data_ptr(), tokens, given,
        ids.dtype == torch.int64, each,
    )  # fmt: skip
    shared = 8 * (each + config.ranks) + 4 * (
        config.experts + config.ranks + 3 * each * config.topk + 2 * each * config.fan_out
    )
    step = GpuStep(number, slot, gen, tokens, (x, scales, ids, weights, live))
    gen.kernels["moe_dispatch_send"].launch(-(-tokens // each) + 1, _THREADS, shared, _stream(gen), arguments)
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
    config = gen.config

    def at(tensor: Any) -> int:
        return 0 if tensor is None else int(tensor.data_ptr())

    arguments = _Recv(
        gen.common(step.slot), at(view.tokens), at(view.scales), at(view.counts), at(view.offsets), at(view.table),
        at(view.local_ids), at(view.weights), at(view.expert_rows), capacity, alignment, KINDS[view.kind], held,
    )  # fmt: skip
    shared = 8 * (held + 1) + 4 * (config.ranks * held + 2 * config.ranks + 1 + held)
    blocks = _grid(gen, view.received.most_rows)
    gen.kernels["moe_dispatch_recv"].launch(blocks, _THREADS, shared, _stream(gen), arguments)
    step.view = view


def _table_bytes(view: GpuView) -> int:
    return 4 * int(view.table.numel())


def combine_send(view: GpuView, y: Any, weighted: bool, dtype: str | None) -> None:
    """See MoeGroup.combine_send."""
    step = view.step
    step.must_be(RECEIVED, "combine_send")
    gen = step.generation
    name = dtype or str(y.dtype).removeprefix("torch.")
    kernel = gen.kernels.get(f"moe_combine_send_{name}")
    if kernel is None:
        raise BadRange(f"y is of {name}: bfloat16, float16 and float32 are summed on GPUs")
    y = _here(gen, y, "y")
    wide = gen.config.hidden * bits_of(name) // 8
    y = _rows(gen, y.reshape(-1, gen.config.hidden), "y", wide, 0)
    if len(y) != view.rows:
        raise BadRange(f"y has {len(y)} rows, the view that it belongs to has {view.rows}")
    arguments = _Back(
        gen.common(step.slot), y.data_ptr(), view.table.data_ptr(), weighted, KINDS[view.kind], view.received.experts, 0
    )
    kernel.launch(_grid(gen, view.received.most_rows), _THREADS, _table_bytes(view), _stream(gen), arguments)
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
    arguments = _Back(
        gen.common(step.slot), 0, view.table.data_ptr(), 0, KINDS[view.kind], view.received.experts, _DISCARDED
    )
    gen.kernels["moe_combine_send_bfloat16"].launch(1, _THREADS, _table_bytes(view), _stream(gen), arguments)
    step.state = RETURNED


def combine_recv(step: GpuStep, out: Any, accumulate: bool) -> Any:
    """See MoeGroup.combine_recv."""
    import torch

    step.must_be(RETURNED, "combine_recv")
    gen = step.generation
    config = gen.config
    if out is None:
        if accumulate:
            raise BadRange("accumulate=True needs out=: the rows to add to")
        out = torch.empty(
            (step.tokens, config.hidden), dtype=torch_dtype(config.out_dtype),
            device=torch.device("cuda", gen.device.number),
        )  # fmt: skip
    _here(gen, out, "out")
    wanted = (step.tokens, config.hidden)
    if tuple(out.shape) != wanted or out.dtype != torch_dtype(config.out_dtype) or not out.is_contiguous():
        raise BadRange(
            f"out is {out.dtype} of shape {tuple(out.shape)}: {config.out_dtype} of shape {wanted}, contiguous, is "
            "wanted"
        )
    if out.data_ptr() % 16:
        raise BadRange("out= must begin at a multiple of 16 bytes")
    each = _each(gen, step.tokens)
    parts = 2 if each == 1 and step.tokens <= gen.device.multiprocessors else 1
    arguments = _Sum(gen.common(step.slot), out.data_ptr(), step.tokens, each, parts, accumulate)
    blocks = max(1, -(-step.tokens // each)) * parts
    gen.kernels["moe_combine_recv"].launch(blocks, _THREADS, 0, _stream(gen), arguments)
    step.state = DONE
    step.view = None
    step.keep = ()  # torch keeps memory for the stream that used it
    return out
