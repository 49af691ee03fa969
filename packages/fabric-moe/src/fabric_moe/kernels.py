"""The loops over bytes and numbers: packing rows, gathering them, the two sums. In C where that was built, else numpy.

The order of every addition is part of the contract (see combine.py): float32 (float64 if sums are carried in that), one
product and one addition at a time, never fused. Both ways give the same bits; C knows bfloat16 and float32, numpy all.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fabric_moe.config import MoeConfig
from fabric_moe.dtypes import FLOATS, Bytes, bits_of, narrow, widen
from fabric_moe.layout import HEAD
from fabric_moe.routing import Route

if TYPE_CHECKING:
    from fabric_moe.generation import Generation
    from fabric_moe.step import Step
    from fabric_moe.views import View

__all__ = ["C_TYPES", "dense", "gather", "in_c", "numpy_type", "pack", "pointer", "reduce", "terms", "weigh"]


def _load() -> Any:
    try:
        return importlib.import_module("fabric_moe._native")
    except ImportError:  # built without a compiler: hatch_build.py said so
        return None


NATIVE = _load()  #: the C part, or None
C_TYPES = {"bfloat16": 0, "float32": 1}
_BLOCK = 1 << 18  #: bytes of sums that numpy works on at a time


def pointer(array: NDArray[Any], kind: str) -> Any:
    """The address of an array's first element, for C, which takes what follows as dense (numpy's own strides apart)."""
    if array.flags.c_contiguous:  # a tenth of the time that `array.ctypes` takes
        return NATIVE.ffi.from_buffer(kind + "[]", array)
    return NATIVE.ffi.cast(kind + " *", array.ctypes.data)


def numpy_type(name: str) -> type[np.generic]:
    """Return the numpy type of the bits of a sum: uint16 for bfloat16."""
    return FLOATS[name]


def pack(rows: NDArray[np.void], tokens: Bytes, scales: Bytes | None, plan: Route, stamp: int) -> None:
    """Make the rows of a step in the memory that is sent, in the plan's order."""
    if NATIVE is not None and tokens.strides[1] == 1 and (scales is None or scales.strides[1] == 1):
        kind = rows.dtype
        offsets: Mapping[str, Any] = kind.fields or {}
        parts = {"token": tokens, "scales": scales, "ids": plan.ids, "weights": plan.weights}
        fields = [
            (pointer(part, "uint8_t"), part.strides[0], part.shape[1] * part.itemsize, offsets[name][1])
            for name, part in parts.items()
            if part is not None
        ]
        NATIVE.lib.moe_pack(
            pointer(rows, "uint8_t"), kind.itemsize, pointer(plan.token, "int64_t"), len(plan.token),
            NATIVE.ffi.new("moe_field[]", fields), len(fields), offsets["stamp"][1], stamp,
        )  # fmt: skip
        return
    out = rows[: len(plan.token)]
    gather(tokens, plan.token, out["token"])
    if scales is not None:
        gather(scales, plan.token, out["scales"])
    out["ids"] = plan.ids[plan.token]
    out["weights"] = plan.weights[plan.token]
    out["stamp"] = stamp


def gather(field: Bytes, index: NDArray[np.int64], out: Bytes) -> None:
    """out[i] = field[index[i]], zeros where the index is negative. Rows of bytes."""
    if NATIVE is not None and out.strides[1] == field.strides[1] == 1:
        index = np.ascontiguousarray(index, np.int64)  # np.nonzero gives columns
        NATIVE.lib.moe_rows(
            pointer(out, "uint8_t"), out.strides[0], pointer(field, "uint8_t"), field.strides[0],
            pointer(index, "int64_t"), len(index), out.shape[1],
        )  # fmt: skip
        return
    keep = index >= 0
    if keep.all():
        out[:] = field[index]
    else:
        out[keep] = field[index[keep]]
        out[~keep] = 0


def terms(view: View, weighted: bool, rows: slice = slice(None)) -> tuple[NDArray[np.int64], NDArray[Any] | None]:
    """Return which rows of a view make up each received row, [N, k], -1 for none, and what each is multiplied by."""
    if view.positions is None:  # the caller has summed already: one row each
        return view.where[rows, None], None
    return view.positions[rows], view.received.weights[rows] if weighted else None


def in_c(y: Bytes, name: str, config: MoeConfig) -> bool:
    """Whether C makes the partial sums of these rows."""
    return NATIVE is not None and name in C_TYPES and config.wire in C_TYPES and y.ctypes.data % 4 == 0


def dense(at: NDArray[np.int64], weights: NDArray[Any] | None) -> tuple[NDArray[np.int64], NDArray[Any] | None]:
    """Return both as C takes them."""
    return np.ascontiguousarray(at, np.int64), None if weights is None else np.ascontiguousarray(weights, np.float32)


def weigh(
    view: View, y: Bytes, name: str, config: MoeConfig, first: int, last: int, weighted: bool, out: Bytes
) -> None:
    """Write the partial sums of received rows first..last into `out`, as rows of the type that travels.

    y: rows of the view, of type `name`. weighted: multiply by the router's weights. out: [last - first, a row or more].
    """
    at, weights = terms(view, weighted, slice(first, last))
    if in_c(y, name, config):
        acc = np.empty(config.hidden, np.float32)
        at, weights = dense(at, weights)
        NATIVE.lib.moe_weigh(
            pointer(y, "uint8_t"), C_TYPES[name], config.hidden, pointer(at, "int64_t"),
            NATIVE.ffi.NULL if weights is None else pointer(weights, "float"), len(at), at.shape[1],
            pointer(acc, "float"), pointer(out, "uint8_t"), out.strides[0], C_TYPES[config.wire],
        )  # fmt: skip
        return
    kind, used = config.weight_type, config.hidden * bits_of(config.wire) // 8
    block = max(1, _BLOCK // (config.hidden * 4))
    for lo in range(0, len(at), block):
        hi = min(len(at), lo + block)
        sums = np.zeros((hi - lo, config.hidden), kind)
        with np.errstate(over="ignore", invalid="ignore"):
            for j in range(at.shape[1]):
                some = np.nonzero(at[lo:hi, j] >= 0)[0]
                if len(some):
                    term = widen(y[at[lo:hi, j][some]], name).astype(kind, copy=False)
                    sums[some] += term if weights is None else term * weights[lo:hi, j][some, None]
        out[lo:hi, :used] = narrow(sums, config.wire)


def reduce(out: Bytes, gen: Generation, step: Step, accumulate: bool) -> None:
    """Add the sums of all ranks for each token, in the order of the ranks, then what is in `out` if asked."""
    config, plan = gen.config, step.route
    size, kind = config.sum_bytes, config.weight_type
    used = config.hidden * bits_of(config.wire) // 8
    rank = np.repeat(np.arange(config.ranks), plan.counts)
    # where the sum of each row that was sent begins: blocks by rank, a head in front of each
    at = gen.layout.sums_at(step.slot, 0, 0) + HEAD * (rank + 1) + size * np.arange(len(plan.token))
    table = np.full((plan.tokens, config.fan_out), -1, np.int64)
    table[plan.token, plan.turn] = at
    if NATIVE is not None and config.wire in C_TYPES and config.out_dtype in C_TYPES and out.ctypes.data % 4 == 0:
        acc = np.empty(config.hidden, np.float32)
        NATIVE.lib.moe_reduce(
            pointer(gen.inbound.bytes, "uint8_t"), pointer(table, "int64_t"), plan.tokens, config.fan_out,
            config.hidden, C_TYPES[config.wire], pointer(acc, "float"), pointer(out, "uint8_t"),
            C_TYPES[config.out_dtype], accumulate,
        )  # fmt: skip
        return
    memory = np.ndarray((len(gen.inbound.bytes) // 16, 16), np.uint8, gen.inbound.memory)
    lanes = np.arange(size // 16)
    block = max(1, _BLOCK // (config.hidden * 4))
    for lo in range(0, plan.tokens, block):
        hi = min(plan.tokens, lo + block)
        sums = np.zeros((hi - lo, config.hidden), kind)
        with np.errstate(over="ignore", invalid="ignore"):
            for turn in range(config.fan_out):
                where = table[lo:hi, turn]
                some = np.nonzero(where >= 0)[0]
                if not len(some):
                    break
                rows = memory[where[some, None] // 16 + lanes].reshape(len(some), size)[:, :used]
                sums[some] += widen(np.ascontiguousarray(rows), config.wire)
            if accumulate:
                sums += widen(np.ascontiguousarray(out[lo:hi]), config.out_dtype)
        out[lo:hi] = narrow(sums, config.out_dtype)
