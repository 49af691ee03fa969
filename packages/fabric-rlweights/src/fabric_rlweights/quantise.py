"""bf16, fp16 or fp32 to fp8 e4m3, by blocks or by tensors: in two steps, between which ranks agree about scales.

    sf = max(abs(x)) / 448, with max(abs(x)) at least 1e-4;  q = x * (1 / sf), rounded to nearest even.

All in float32; max is exact and associative, so any cutting gives the same bits. So does a GPU: each operation is one
that IEEE 754 defines, and none is left to a library's idea of a shortcut. Needs torch, imported when used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_rlweights.boxes import Ints

__all__ = [
    "FLOOR", "KERNEL", "LARGEST", "Floats", "fused_on", "in_steps", "kernel_on", "magnitudes", "quantise", "scales",
    "workspace",
]  # fmt: skip

log = logging.getLogger("fabric.rlweights")
Floats = NDArray[np.float32]
KERNEL = 128  #: the block that there is a kernel for
LARGEST = 448.0  #: of float8_e4m3fn
FLOOR = 1e-4  #: below this, a block is as good as zero: keeps the inverse finite


def scales(largest: Any) -> Any:
    """Return sf for each max(abs(x)): float32, on the same device."""
    # by a tensor: divided by a number, a GPU multiplies with its reciprocal, which is another result in the last bit
    return largest.clamp(min=FLOOR) / largest.new_full((), LARGEST)


def workspace(rows: Ints, columns: Ints, block: Ints) -> Ints:
    """Return the bytes of float32 that `quantise` needs beside its result: one row of blocks."""
    return np.minimum(rows, block) * columns * 4


@functools.cache
def fused_on(device: str) -> bool:
    """Whether one operation there reads, multiplies and writes fp8, so that `quantise` needs no workspace."""
    if device == "cpu":
        return False
    import torch

    x = torch.tensor([1.0, -3.0, 0.3, 448.0], dtype=torch.bfloat16, device=device)
    factor = torch.tensor([0.5, 1.0, 1.0, 1.0], device=device)
    out = torch.zeros(4, dtype=torch.float8_e4m3fn, device=device)
    try:
        torch.mul(x, factor, out=out)
    except RuntimeError:  # this torch does not convert on the way
        return False
    return bool(torch.equal(out.float().cpu(), torch.tensor([0.5, -3.0, 0.3125, 448.0])))


def _spans(first: int, count: int, block: int) -> list[tuple[int, int, int]]:
    """Return [(begin, end, blocks)]: what is left of a block that began before, whole blocks, what is left at the end.

    Relative to the first element, whose index is `first`.
    """
    low = min(count, -first % block)
    high = low + (count - low) // block * block
    parts = ((0, low, 1), (low, high, (high - low) // block), (high, count, 1))
    return [part for part in parts if part[1] > part[0]]


def _rows(x: Any, row: int, block: int) -> Iterator[tuple[slice, int, int, int, int]]:
    """Yield (matrices, begin, end, number of the first block, blocks): in the host's memory what caches hold.

    A GPU gets whole blocks all at once.
    """
    host = x.device.type == "cpu"
    for n in [slice(k, k + 1) for k in range(x.shape[0])] if host else [slice(None)]:
        number = 0
        for begin, end, blocks in _spans(row, x.shape[1], block):
            height = (end - begin) // blocks
            for low in range(begin, end, height if host else end - begin):
                many = 1 if host else blocks
                yield n, low, low + many * height, number, many
                number += many


def _columns(x: Any, column: int, block: int) -> list[tuple[int, int, int, int]]:
    """Return [(begin, end, number of the first block, blocks)]."""
    found, number = [], 0
    for begin, end, blocks in _spans(column, x.shape[2], block):
        found.append((begin, end, number, blocks))
        number += blocks
    return found


def _tiles(x: Any, rows: int, columns: int) -> Any:
    """View [n, R, C] as [n, rows, R / rows, columns, C / columns]."""
    return x.unflatten(2, (columns, -1)).unflatten(1, (rows, -1))


def _largest(x: Any, axes: tuple[int, ...]) -> Any:
    import torch

    if x.device.type == "cpu":  # twice over, for on CPUs these two have the fast loops
        return torch.maximum(x.amax(dim=axes).float(), -x.amin(dim=axes).float())
    return torch.linalg.vector_norm(x, float("inf"), dim=axes).float()


def magnitudes(x: Any, row: int, column: int, block: int) -> Any:
    """Return max(abs(x)) of each block that the tensor x, [n, R, C], touches: float32 [n, rows, columns] of blocks.

    `row` and `column` are the indices in the parameter of x's first element. block=0: one for everything, [1, 1, 1].
    Takes no memory beyond the result's; the result is on x's device.
    """
    import torch

    if block == 0:
        return _largest(x, (0, 1, 2)).reshape(1, 1, 1)
    columns = _columns(x, column, block)
    rows = sum(blocks for *_, blocks in _spans(row, x.shape[1], block))
    found = torch.empty((x.shape[0], rows, sum(blocks for *_, blocks in columns)), dtype=torch.float32, device=x.device)
    for n, top, bottom, r, many in _rows(x, row, block):
        for left, right, c, wide in columns:
            tiles = _tiles(x[n, top:bottom, left:right], many, wide)
            found[n, r : r + many, c : c + wide] = _largest(tiles, (2, 4))
    return found


def quantise(x: Any, largest: Any, out: Any, work: Any, row: int, column: int, block: int, into: Any = None) -> Any:
    """Write x, [n, R, C], as fp8 into `out` (a contiguous float8_e4m3fn tensor of that shape); returns the scales.

    `largest` is max(abs(x)) of each whole block that x touches, as `magnitudes` gives it; None: x has all of them.
    `work` is a flat float32 tensor of at least `workspace` bytes, and None if `fused_on` this device. x may have any
    strides. `into`: contiguous float32 of the scales' shape, which is then what is returned.
    """
    device = _name(x.device)
    if block == KERNEL and kernel_on(device):
        from fabric_rlweights import fp8_kernel

        if into is None:
            import torch

            shape = [
                x.shape[0],
                *(-(-(first % block + n) // block) for first, n in ((row, x.shape[1]), (column, x.shape[2]))),
            ]
            into = torch.empty(shape, dtype=torch.float32, device=x.device)
        fp8_kernel.run(x, largest, out, into, row, column)
        return into
    found = in_steps(x, largest, out, work, row, column, block)
    return found if into is None else into.copy_(found)


def in_steps(x: Any, largest: Any, out: Any, work: Any, row: int, column: int, block: int) -> Any:
    """Do what `quantise` does by operations of torch."""
    import torch

    if largest is None:
        largest = magnitudes(x, row, column, block)
    found = scales(largest)
    factor = found.new_ones(()) / found
    if block:
        columns = _columns(x, column, block)
    else:
        columns, factor = [(0, x.shape[2], 0, 1)], factor.reshape(1, 1, 1)
    if fused_on(_name(x.device)):
        for n, top, bottom, r, many in _rows(x, row if block else 0, block or x.shape[1]):
            for left, right, c, wide in columns:
                part = factor[n, r : r + many, None, c : c + wide, None] if block else factor.reshape((1,) * 5)
                tiles = _tiles(x[n, top:bottom, left:right], many, wide)
                torch.mul(tiles, part, out=_tiles(out[n, top:bottom, left:right], many, wide))
        return found
    for matrix in range(x.shape[0]):
        r = 0
        for begin, end, blocks in _spans(row if block else 0, x.shape[1], block or 128):
            height = (end - begin) // blocks
            for top in range(begin, end, height):
                strip = work[: height * x.shape[2]].view(height, x.shape[2])
                strip.copy_(x[matrix, top : top + height])
                for left, right, c, wide in columns:
                    scale = factor[matrix, r, c : c + wide, None] if block else factor.reshape(1, 1)
                    strip[:, left:right].unflatten(1, (wide, -1)).mul_(scale)
                out[matrix, top : top + height].copy_(strip)
                r += 1
    return found


@functools.cache
def kernel_on(device: str) -> bool:
    """Whether one kernel does all of it there for blocks of 128, with the bits of the CPU."""
    if device == "cpu":
        return False
    try:
        import torch

        from fabric_rlweights import fp8_kernel

        with torch.cuda.device(device):  # a kernel runs on the thread's current GPU, wherever its tensors lie
            return fp8_kernel.works_on(device)
    except Exception as error:  # no Triton, no compiler for its launcher, a GPU without fp8: torch does it in steps
        log.info("fp8 on %s by operations of torch: %s: %s", device, type(error).__name__, error)
        return False


def _name(device: Any) -> str:
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"
