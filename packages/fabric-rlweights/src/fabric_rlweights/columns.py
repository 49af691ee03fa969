"""Both sides' tables as columns: a row for each box of any rank. All have D axes: short shapes get leading 1s."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np

from fabric_core import ConfigError
from fabric_rlweights.boxes import Ints
from fabric_rlweights.dtypes import NAMES

__all__ = ["DIRECT", "FALLBACK", "LAYOUTS", "QUANTS", "STAGING", "Columns", "Held", "Params", "Tensors", "Wants", "pad"]

LAYOUTS = ("direct", "staging", "fallback")
DIRECT, STAGING, FALLBACK = range(3)
QUANTS = ("", "block", "tensor")


def pad(values: Any, axes: int, fill: int) -> tuple[int, ...]:
    """Return `values` with leading `fill`s, `axes` long."""
    return (fill,) * (axes - len(values)) + tuple(values)


class Columns:
    """Base of the tables below: dataclasses of arrays with the same number of rows."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]

    def take(self, rows: Any) -> Self:
        """Return some of the rows."""
        return type(self)(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})  # type: ignore[arg-type]

    @classmethod
    def concat(cls, parts: list[Self]) -> Self:
        """Return all rows of several tables."""
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclass
class Params:
    """The model's parameters, as the trainers name them."""

    axes: int  #: D
    names: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[int] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, shape: tuple[int, ...], dtype: int) -> int:
        """Return the number of a parameter. Raises ConfigError if two ranks do not agree about it."""
        known = self.index.get(name)
        if known is None:
            self.index[name] = known = len(self.names)
            self.names.append(name)
            self.shapes.append(shape)
            self.dtypes.append(dtype)
        elif self.shapes[known] != shape or self.dtypes[known] != dtype:
            raise ConfigError(
                f"{name}: one trainer rank says {NAMES[self.dtypes[known]]} {self.shapes[known]}, another one "
                f"{NAMES[dtype]} {shape}"
            )
        return known

    @property
    def shape(self) -> Ints:
        """[n, D]"""
        padded = [pad(shape, self.axes, 1) for shape in self.shapes]
        return np.array(padded, np.int64).reshape(len(padded), self.axes)


@dataclass
class Held(Columns):
    """Boxes of parameters in the trainers' memory."""

    param: Ints
    rank: Ints
    buffer: Ints
    start: Ints  #: [n, D]
    size: Ints
    offset: Ints  #: bytes in the buffer
    stride: Ints  #: bytes, [n, D]


@dataclass
class Tensors:
    """Tensors of the inference ranks."""

    names: list[str]
    rank: Ints
    number: Ints  #: within the rank
    shape: Ints  #: [n, D']
    stride: Ints  #: bytes
    dtype: Ints
    layout: Ints  #: index of LAYOUTS
    quant: Ints  #: index of QUANTS
    scales: Ints  #: the tensor of the scales, -1: none
    block: Ints
    address: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.rank)


@dataclass
class Wants(Columns):
    """Boxes of parameters that inference ranks want."""

    param: Ints
    tensor: Ints
    start: Ints  #: in the parameter, [n, D]
    size: Ints
    offset: Ints  #: bytes in the tensor
    stride: Ints  #: bytes in the tensor, for each axis of the parameter
    at: Ints  #: the same box in the tensor, [n, D']
    extent: Ints
    scale_offset: Ints  #: bytes in the tensor of scales, of the first block's
    scale_stride: Ints  #: bytes there for a block (last two axes) or an element (the others), [n, D]
