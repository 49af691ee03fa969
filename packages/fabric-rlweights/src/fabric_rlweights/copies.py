"""Copies that an engine's loader made, as entries of its table: which box of a parameter went to which of a tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fabric_rlweights.dtypes import itemsize_of
from fabric_rlweights.meta import Entry, Tensor, contiguous

__all__ = ["Copy", "alike", "entries_of", "owner_of"]

_MOST_ENTRIES = 65536  #: of one copy: beyond, the weight falls back


@dataclass(frozen=True)
class Copy:
    """One copy_: geometry in elements."""

    param: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    address: int  #: of the destination's first element
    there: tuple[int, ...]  #: its strides
    source: str  #: element type that the weight was viewed as
    target: str  #: and the destination

    @property
    def span(self) -> tuple[int, int]:
        """(first byte, end) of the destination."""
        reach = sum((n - 1) * step for n, step in zip(self.size, self.there, strict=True) if n)
        return self.address, self.address + reach + itemsize_of(self.target)


def owner_of(spans: list[tuple[int, int, str]], address: int) -> str | None:
    return next((name for begin, end, name in spans if begin <= address < end), None)


def alike(copy: Copy, param: str, tensor: str) -> Copy | None:
    """Return the copy in elements of the parameter; None: it is of bits that are viewed as something else."""
    if (copy.source, copy.target) == (param, tensor):
        return copy
    if copy.source != copy.target or param != tensor:
        return None
    parts, rest = divmod(itemsize_of(param), itemsize_of(copy.source))
    if parts == 1 and not rest:
        return replace(copy, source=param, target=tensor)
    # narrower ones: whole elements, which lie together on both sides
    if rest or parts < 1 or not copy.size or copy.stride[-1] != 1 or copy.there[-1] != itemsize_of(copy.target):
        return None
    if copy.offset % parts or copy.size[-1] % parts or any(step % parts for step in copy.stride[:-1]):
        return None
    return replace(
        copy,
        offset=copy.offset // parts,
        size=(*copy.size[:-1], copy.size[-1] // parts),
        stride=(*(step // parts for step in copy.stride[:-1]), 1),
        there=(*copy.there[:-1], itemsize_of(tensor)),
        source=param,
        target=tensor,
    )


def entries_of(copy: Copy, param: tuple[tuple[int, ...], str], tensor: Tensor) -> list[Entry] | None:
    """Return the entries of one copy: each axis of the view runs along one axis of the parameter and one of the tensor.

    Several axes of the view along one axis of the parameter (a reshape) are one box for each index of the outer ones.
    """
    shape, dtype = param
    whole = [step // itemsize_of(dtype) for step in contiguous(shape, itemsize_of(dtype))]
    inner: list[tuple[int, int, int]] = []  # axis of the parameter, of the tensor, extent
    outer: list[tuple[int, int, int]] = []  # step in the parameter (elements), in the tensor (bytes), extent
    for extent, step, there in zip(copy.size, copy.stride, copy.there, strict=True):
        if extent == 1:
            continue
        source = next((d for d, s in enumerate(whole) if s == step and shape[d] > 1), None)
        target = next((d for d, s in enumerate(tensor.strides) if s == there and tensor.shape[d] > 1), None)
        taken = {axis for axis, _t, _n in inner}, {axis for _s, axis, _n in inner}
        if source is None or target is None or source in taken[0] or target in taken[1]:
            outer.append((step, there, extent))
        else:
            inner.append((source, target, extent))
    count = int(np.prod([extent for _s, _t, extent in outer], dtype=np.int64))
    if count > _MOST_ENTRIES or any(step == 0 for step, _t, _n in outer):
        return None
    found = []
    for index in np.ndindex(*[extent for _s, _t, extent in outer]):
        offset = copy.offset + sum(i * step for i, (step, _t, _n) in zip(index, outer, strict=True))
        address = copy.address - tensor.address + sum(i * t for i, (_s, t, _n) in zip(index, outer, strict=True))
        start, at = _unravel(offset, whole, shape), _unravel(address, list(tensor.strides), tensor.shape)
        if start is None or at is None:
            return None
        size, axes = [1] * len(shape), [-1] * len(shape)
        for axis, target, extent in inner:
            size[axis], axes[axis] = extent, target
            if start[axis] + extent > shape[axis] or at[target] + extent > tensor.shape[target]:
                return None
        _name_free(axes, len(tensor.shape))
        found.append(
            Entry(
                param=copy.param, start=tuple(start), size=tuple(size), tensor=tensor.name, at=tuple(at),
                axes=tuple(axes),
            )
        )  # fmt: skip
    return found


def _name_free(axes: list[int], count: int) -> None:
    """Give axes of extent 1 the tensor's axis at the same distance from the end, if nobody has it."""
    for axis, target in enumerate(axes):
        same = count - len(axes) + axis
        if target < 0 <= same and same not in axes:
            axes[axis] = same


def _unravel(offset: int, strides: list[int], shape: tuple[int, ...]) -> list[int] | None:
    found = [0] * len(shape)
    for axis in sorted(range(len(shape)), key=lambda d: -strides[d]):
        if strides[axis] > 0 and shape[axis] > 1:
            found[axis], offset = divmod(offset, strides[axis])
            if found[axis] >= shape[axis]:
                return None
    return found if offset == 0 else None
