"""bf16, fp16 or fp32 to fp8 e4m3, by blocks or by tensors: in two steps, between which ranks agree about scales.

    sf = max(abs(x)) / 448, with max(abs(x)) at least 1e-4;  q = x * (1 / sf), rounded to nearest even.

All in float32; max is exact and associative, so any cutting gives the same bits. Needs torch, imported when used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_rlweights.boxes import Ints

__all__ = ["FLOOR", "LARGEST", "inverse", "magnitudes", "quantise", "scales", "workspace"]

Floats = NDArray[np.float32]
LARGEST = np.float32(448.0)  #: of float8_e4m3fn
FLOOR = np.float32(1e-4)  #: below this, a block is as good as zero: keeps the inverse finite


def scales(largest: Floats) -> Floats:
    """Return sf for each max(abs(x))."""
    return (np.maximum(largest, FLOOR) / LARGEST).astype(np.float32)


def inverse(largest: Floats) -> Floats:
    """Return 1 / sf for each max(abs(x))."""
    return (np.float32(1.0) / scales(largest)).astype(np.float32)


def workspace(rows: Ints, columns: Ints, block: Ints) -> Ints:
    """Return the bytes of float32 that `quantise` needs beside its result: one row of blocks."""
    return np.minimum(rows, block) * columns * 4


def _cuts(first: int, count: int, block: int) -> list[tuple[int, int]]:
    """Return [(begin, end)] of the parts that lie in one block each, relative to the first element."""
    cuts, begin = [], 0
    while begin < count:
        end = min(count, begin + block - (first + begin) % block)
        cuts.append((begin, end))
        begin = end
    return cuts


def magnitudes(x: Any, row: int, column: int, block: int) -> Floats:
    """Return max(abs(x)) of each block that the tensor x, [n, R, C], touches: float32 [n, rows, columns] of blocks.

    `row` and `column` are the indices in the parameter of x's first element. block=0: one for everything, [1, 1, 1].
    Takes no memory beyond the result's.
    """
    if block == 0:
        return np.array([[[max(float(x.amax()), -float(x.amin()))]]], np.float32)
    rows = _cuts(row, x.shape[1], block)
    columns = _cuts(column, x.shape[2], block)
    found = np.empty((x.shape[0], len(rows), len(columns)), np.float32)
    inner = [k for k, (begin, end) in enumerate(columns) if end - begin == block]
    for n in range(x.shape[0]):
        for r, (top, bottom) in enumerate(rows):
            if inner:  # whole blocks lie side by side: one reduction for all of them
                part = x[n, top:bottom, columns[inner[0]][0] : columns[inner[-1]][1]]
                part = part.unflatten(1, (len(inner), block))
                found[n, r, inner[0] : inner[-1] + 1] = np.maximum(
                    part.amax(dim=(0, 2)).float().numpy(), -part.amin(dim=(0, 2)).float().numpy()
                )
            for c, (left, right) in enumerate(columns):
                if right - left != block:
                    part = x[n, top:bottom, left:right]
                    found[n, r, c] = max(float(part.amax()), -float(part.amin()))
    return found


def quantise(x: Any, largest: Floats, out: Any, work: Any, row: int, column: int, block: int) -> None:
    """Write x, [n, R, C], as fp8 into `out` (a contiguous float8_e4m3fn tensor of that shape).

    `largest` is max(abs(x)) of each whole block that x touches, as `magnitudes` gives it; `work` is a flat float32
    tensor of at least `workspace` bytes. x may have any strides.
    """
    import torch

    factor = torch.from_numpy(inverse(largest))
    columns = _cuts(column, x.shape[2], block) if block else [(0, x.shape[2])]
    rows = _cuts(row, x.shape[1], block) if block else _cuts(0, x.shape[1], 128)
    inner = [k for k, (begin, end) in enumerate(columns) if end - begin == block]
    for n in range(x.shape[0]):
        for r, (top, bottom) in enumerate(rows):
            strip = work[: (bottom - top) * x.shape[2]].view(bottom - top, x.shape[2])
            strip.copy_(x[n, top:bottom])
            if not block:
                strip.mul_(factor[0, 0, 0])
            elif inner:
                part = strip[:, columns[inner[0]][0] : columns[inner[-1]][1]].unflatten(1, (len(inner), block))
                part.mul_(factor[n, r, inner[0] : inner[-1] + 1, None])
            if block:
                for c, (left, right) in enumerate(columns):
                    if right - left != block:
                        strip[:, left:right].mul_(factor[n, r, c])
            out[n, top:bottom].copy_(strip)
