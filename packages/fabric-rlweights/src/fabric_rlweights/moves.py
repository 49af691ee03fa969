"""From a box with strides on both sides to runs: what is contiguous is one write, the rest are pages of one length."""

from __future__ import annotations

import numpy as np

from fabric_rlweights.boxes import Ints

__all__ = ["pages", "runs"]


def runs(size: Ints, item: Ints, *strides: Ints) -> Ints:
    """Return the bytes of the longest run of each box that is contiguous for all the strides given ([n, D] each).

    Axes are taken in the order of the last strides (the destination's), the densest first.
    """
    order = np.argsort(np.where(size > 1, strides[-1], 0), axis=1, kind="stable")  # axes of extent 1 first: no matter
    extent = np.take_along_axis(size, order, axis=1)
    steps = [np.take_along_axis(stride, order, axis=1) for stride in strides]
    run = item.copy()
    going = np.ones(len(size), dtype=bool)
    for axis in range(size.shape[1]):
        wide = extent[:, axis] > 1
        fits = np.ones(len(size), dtype=bool)
        for stride in steps:
            fits &= stride[:, axis] == run
        run = np.where(going & wide & fits, run * extent[:, axis], run)
        going &= ~wide | fits
    return run


def pages(size: tuple[int, ...], item: int, *strides: tuple[int, ...]) -> tuple[int, list[Ints]]:
    """Return (bytes of a run, for each of the strides the offset in bytes of every run, in one order) for one box."""
    axes = sorted(
        [(*(stride[axis] for stride in reversed(strides)), count) for axis, count in enumerate(size) if count > 1],
        key=lambda row: row[0],
    )
    run = item
    while axes and all(step == run for step in axes[0][:-1]):
        run *= axes.pop(0)[-1]
    found = []
    for which in range(len(strides)):
        offset = np.zeros(1, np.int64)
        for row in reversed(axes):
            offset = (offset[:, None] + np.arange(row[-1], dtype=np.int64) * row[len(strides) - 1 - which]).ravel()
        found.append(offset)
    return run, found
