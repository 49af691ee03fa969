"""The digest (digest.py) in torch's int64, which wraps as uint64 does: for bytes that lie on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from fabric_rlweights.boxes import Ints

__all__ = ["runs_digest"]

CHUNK = 1 << 20  #: elements at a time: some 40 MiB of temporary memory
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


_FIRST, _SECOND = _signed(0x9E3779B97F4A7C15), _signed(0xD6E8FEB86659FD93)


def _weights(index: Any) -> Any:
    """Overwrites `index`. Right shifts of int64 bring the sign along, which is masked off."""
    w = index.mul_(_FIRST)
    w ^= (w >> 31) & ((1 << 33) - 1)
    w *= _SECOND
    w ^= (w >> 32) & ((1 << 32) - 1)
    w |= 1
    return w


def runs_digest(memory: Any, item: int, places: Ints, index: Ints, run: int) -> Any:
    """Return the sum over runs of `run` bytes at `places` [n] of a flat uint8 tensor: an int64 tensor, 0-d.

    `index` [n]: which element of its tensor each run's first one is. Places are multiples of `item`.
    """
    import torch

    bits = memory[: len(memory) // item * item].view(getattr(torch, _BITS[item]))
    length = run // item
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    table = torch.from_numpy(np.stack([places // item, index])).to(memory.device, non_blocking=True)
    rows = max(1, CHUNK // length)
    for top in range(0, len(places), rows):
        some = table[:, top : top + rows]
        for left in range(0, length, CHUNK):
            step = torch.arange(left, min(left + CHUNK, length), dtype=torch.int64, device=memory.device)
            if some.shape[1] == 1:  # one long run: a slice
                begin = int(places[top]) // item + left
                part = bits[begin : begin + len(step)][None].to(torch.int64)
            else:
                part = bits[some[0][:, None] + step].to(torch.int64)
            if item < 8:
                part &= (1 << 8 * item) - 1
            part += 1
            part *= _weights(some[1][:, None] + step)
            total += part.sum()
    return total
