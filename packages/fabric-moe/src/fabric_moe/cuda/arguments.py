"""What the halves are given and what kernels are given: tensors that are looked at, structures passed by value."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from fabric_core import BadRange
from fabric_moe.cuda.generation import Common
from fabric_moe.dtypes import check_type, flat, is_torch

if TYPE_CHECKING:
    from fabric_moe.cuda.generation import GpuGeneration

__all__ = ["Back", "Recv", "Send", "Sum", "here", "rows_of", "tokens_of"]


class Send(ctypes.Structure):
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
        ("split", ctypes.c_int32),
    )


class Recv(ctypes.Structure):
    _fields_ = (
        ("c", Common),
        ("tokens", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("offsets", ctypes.c_uint64),
        ("starts", ctypes.c_uint64),
        ("plan", ctypes.c_uint64),
        ("local_ids", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("expert_rows", ctypes.c_uint64),
        ("capacity", ctypes.c_int64),
        ("alignment", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("held", ctypes.c_int32),
    )


class Back(ctypes.Structure):
    _fields_ = (
        ("c", Common),
        ("y", ctypes.c_uint64),
        ("plan", ctypes.c_uint64),
        ("starts", ctypes.c_uint64),
        ("weighted", ctypes.c_int32),
        ("flags", ctypes.c_int32),
    )


class Sum(ctypes.Structure):
    _fields_ = (
        ("c", Common),
        ("out", ctypes.c_uint64),
        ("tokens", ctypes.c_int32),
        ("each", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("accumulate", ctypes.c_int32),
    )


def rows_of(gen: GpuGeneration, x: Any, what: str, nbytes: int, tokens: int, kind: str | None = None) -> Any:
    """Return a contiguous tensor on the group's GPU whose rows have `nbytes`, of numbers of `kind` (None: any).

    Raises BadRange.
    """
    x = here(gen, x, what)
    wide = flat(x, what)
    if wide.dim() != 2 or (got := int(wide.shape[1]) * int(wide.element_size())) != nbytes:
        raise BadRange(
            f"{what} has shape {tuple(x.shape)} of {x.dtype}: rows of {nbytes} bytes are configured"
            + (f", these have {got}" if wide.dim() == 2 else "")
        )
    if kind is not None:
        check_type(wide, kind, what)
    if len(wide) < tokens:
        raise BadRange(f"{what} has {len(wide)} rows, topk_ids has {tokens} tokens")
    wide = wide.contiguous()
    return wide if wide.data_ptr() % 16 == 0 else wide.clone()


def here(gen: GpuGeneration, x: Any, what: str) -> Any:
    """Return a tensor without its gradient if it is on the group's GPU. Raises BadRange."""
    where = f"cuda:{gen.device.number}"
    if not is_torch(x) or str(x.device) != where:
        found = str(x.device) if is_torch(x) else type(x).__name__
        raise BadRange(f"{what} is on {found}: this group was opened for {where}; give a tensor that is there")
    return x.detach()


def tokens_of(gen: Any, x: Any, ids: Any, weights: Any, scales: Any, live: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return (x, ids, weights, scales, live) of a dispatch as kernels read them: contiguous, float32, one int32.

    gen: the generation of either path on a GPU. See MoeGroup.dispatch_send. Raises BadRange; nothing was sent then.
    """
    import torch

    config = gen.config
    ids = here(gen, ids, "topk_ids")
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise BadRange(f"topk_ids is {ids.dtype} of shape {tuple(ids.shape)}: int64 or int32 [tokens, topk] are wanted")
    tokens, given = int(ids.shape[0]), int(ids.shape[1])
    if tokens > config.max_tokens:
        raise BadRange(f"{tokens} tokens in one step, max_tokens is {config.max_tokens}: split them, or raise it")
    if given > config.topk:
        raise BadRange(f"{given} experts a token, topk is {config.topk}")
    x = rows_of(gen, x, "x", config.token_bytes, tokens, config.dtype)
    if scales is not None and not config.scale_bytes:
        raise BadRange("scales were given, but the group was made with scale_bytes=0")
    if config.scale_bytes:
        if scales is None:
            raise BadRange(f"scales=None: the group was made with {config.scale_bytes} bytes of it for each token")
        scales = rows_of(gen, scales, "scales", config.scale_bytes, tokens)
    if weights is not None:
        weights = here(gen, weights, "topk_weights")
        if weights.shape != ids.shape:
            raise BadRange(f"topk_weights has shape {tuple(weights.shape)}: numbers of shape {tuple(ids.shape)}")
        weights = weights.float().contiguous()
    if isinstance(live, int):
        if isinstance(live, bool) or not 0 <= live <= tokens:
            raise BadRange(f"live={live!r}: topk_ids has {tokens} tokens")
        live = torch.full((1,), live, dtype=torch.int32, device=ids.device)
    elif live is not None:
        live = here(gen, live, "live")
        if live.numel() != 1 or live.dtype != torch.int32:
            raise BadRange(f"live is {live.dtype} of shape {tuple(live.shape)}: one int32 is wanted")
    return x, ids.contiguous(), weights, scales, live
