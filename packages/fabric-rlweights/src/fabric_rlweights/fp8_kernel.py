"""fp8 by blocks of 128 x 128 in one kernel: each is read once, and its numbers and its scale are written. Needs Triton.

The arithmetic is quantise.py's, step by step. `quantise` uses this only where `works_on` has seen it make the bits that
the CPU makes.
"""
# Triton is optional, and its kernels are no typed Python.
# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["BLOCK", "run", "works_on"]

BLOCK = 128


@triton.jit(do_not_specialize=["rows", "row", "column", "step_column"])
def _kernel(
    x, out, scales, largest, rows, columns, row, column, step_n, step_row, step_column,
    GIVEN: tl.constexpr, WHOLE: tl.constexpr, DENSE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    c, r, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = (n * tl.num_programs(1) + r) * tl.num_programs(0) + c
    if WHOLE:  # every block is, and the loads may be wide
        i = r * SIDE + tl.arange(0, SIDE)
        j = c * SIDE + tl.arange(0, SIDE)
    else:
        i = r * SIDE - row + tl.arange(0, SIDE)
        j = c * SIDE - column + tl.arange(0, SIDE)
    inside = (i[:, None] >= 0) & (i[:, None] < rows) & (j[None, :] >= 0) & (j[None, :] < columns)
    across = j if DENSE else j.to(tl.int64) * step_column
    source = x + n.to(tl.int64) * step_n + i.to(tl.int64)[:, None] * step_row + across[None, :]
    target = out + n.to(tl.int64) * rows * columns + i.to(tl.int64)[:, None] * columns + j[None, :]
    v = tl.load(source).to(tl.float32) if WHOLE else tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if GIVEN:
        most = tl.load(largest + place)
    else:
        most = tl.max(tl.max(tl.abs(v), axis=1), axis=0)
        broken = tl.max(tl.max((v != v).to(tl.int32), axis=1), axis=0)  # noqa: PLR0124  # NaN
        most = tl.where(broken > 0, float("nan"), most)
    sf = tl.div_rn(tl.where(most < 1e-4, 1e-4, most), 448.0)
    q = (v * tl.div_rn(1.0, sf)).to(tl.float8e4nv)
    if WHOLE:
        tl.store(target, q)
    else:
        tl.store(target, q, mask=inside)
    tl.store(scales + place, sf)


def run(x: Any, largest: Any, out: Any, scales: Any, row: int, column: int) -> None:
    """Write x, [n, R, C] of any strides, to `out` (contiguous float8_e4m3fn) and `scales` (contiguous float32).

    `row` and `column` are the indices in the parameter of x's first element. `largest`: max(abs(x)) of each whole
    block that x touches, float32 of the shape of `scales`; None: x's own.
    """
    n, rows, columns = x.shape
    row, column = row % BLOCK, column % BLOCK
    grid = (-(-(column + columns) // BLOCK), -(-(row + rows) // BLOCK), n)
    whole = not (row or column or rows % BLOCK or columns % BLOCK)
    step_n, step_row, step_column = x.stride()
    _kernel[grid](
        x, out, scales, scales if largest is None else largest, rows, columns, row, column, step_n, step_row,
        step_column, GIVEN=largest is not None, WHOLE=whole, DENSE=step_column == 1, SIDE=BLOCK, num_warps=8,
    )  # fmt: skip


def works_on(device: str) -> bool:
    """Whether it makes the CPU's bits there: of a few blocks of every magnitude, whole ones and cut ones."""
    import torch

    from fabric_rlweights.quantise import in_steps

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 384, 384, generator=generator) * 10.0 ** torch.randint(-6, 4, (1, 384, 384), generator=generator)
    x = x.bfloat16()
    x[:, :128, 128:256] = 0
    for part, row, column in ((x, 0, 0), (x[:, 3:301, 7:], 131, 263)):
        found = []
        for where in ("cpu", device):
            there = part.to(where)
            out = torch.empty(part.shape, dtype=torch.float8_e4m3fn, device=where)
            if where == "cpu":
                work = torch.empty(BLOCK * part.shape[2])
                scales = in_steps(there, None, out, work, row, column, BLOCK)
            else:
                blocks = [
                    -(-(first % BLOCK + n) // BLOCK) for first, n in ((row, part.shape[1]), (column, part.shape[2]))
                ]
                scales = torch.empty(1, *blocks, device=where)
                run(there, None, out, scales, row, column)
            found.append((out.cpu().view(torch.uint8), scales.cpu().view(torch.int32)))
        if not all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True)):
            return False
    return True
