"""What both sides say about themselves: documents, made once per job, kept as JSON.

A trainer rank lists the boxes of parameters that lie in its memory; an inference rank lists its tensors, and which box
of which parameter belongs where in them. Numbers of elements everywhere, except offsets and strides, which are bytes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fabric_core import ConfigError
from fabric_rlweights.dtypes import itemsize_of

__all__ = ["EngineTable", "Entry", "Layout", "Quant", "Shard", "Tensor", "TrainerTable", "contiguous", "read_tables"]

Layout = Literal["direct", "staging", "fallback"]
MAX_JSON = 1 << 30  #: bytes of a document


class _Doc(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def contiguous(shape: tuple[int, ...] | list[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of a C-contiguous tensor."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


_MOST = 1 << 62  #: bytes, or a product of extents: what int64 columns hold
_Axes = tuple[Annotated[int, Field(ge=-_MOST, lt=_MOST)], ...]


def _within(what: str, shape: tuple[int, ...], strides: tuple[int, ...], item: int, offset: int = 0) -> None:
    """Raise ValueError for strides that no memory of ours has."""
    if any(step < 0 or step % item for step in strides):
        raise ValueError(
            f"{what}: strides of {strides} bytes; each is 0 or more, and a multiple of the element's {item}"
        )
    if math.prod(max(n, 1) for n in shape) * item >= _MOST:
        raise ValueError(f"{what}: a shape of {shape} is more than any memory holds")
    if offset + sum(max(n - 1, 0) * step for n, step in zip(shape, strides, strict=True)) >= _MOST:
        raise ValueError(f"{what}: strides of {strides} bytes leave any memory")


class Shard(_Doc):
    """A box of a parameter in the memory of a trainer rank."""

    param: str
    shape: tuple[int, ...]  #: of the whole parameter
    dtype: str
    start: tuple[int, ...]  #: of the box, in the whole parameter
    size: tuple[int, ...]
    buffer: int = Field(ge=0, lt=1 << 31)  #: which memory of the rank: the index of a registration
    offset: int = Field(ge=0, lt=_MOST)  #: bytes from its begin to the box's first element
    strides: tuple[int, ...]  #: bytes

    @model_validator(mode="after")
    def _fits(self) -> Self:
        item = itemsize_of(self.dtype)
        if not len(self.shape) == len(self.start) == len(self.size) == len(self.strides):
            raise ValueError(f"{self.param}: shape, start, size and strides must have the same length")
        for extent, first, count in zip(self.shape, self.start, self.size, strict=True):
            if first < 0 or count < 0 or first + count > extent:
                raise ValueError(f"{self.param}: the box {self.start} + {self.size} leaves the shape {self.shape}")
        _within(self.param, self.shape, (0,) * len(self.shape), item)
        _within(self.param, self.size, self.strides, item, self.offset)
        return self


class TrainerTable(_Doc):
    """What one trainer rank holds."""

    rank: int = Field(ge=0, lt=1 << 24)
    shards: tuple[Shard, ...]


class Quant(_Doc):
    """How a tensor is quantised on its way: x is stored as x / scale, in `Tensor.dtype`.

    `block`: one scale for each block of 128 x 128 elements of the last two axes. `tensor`: one for each tensor of a
    rank. quantise.py has the arithmetic.
    """

    scheme: Literal["block", "tensor"]
    scales: str  #: name of the rank's tensor of float32 that takes the scales
    block: int = Field(default=128, ge=1, lt=1 << 31)


class Tensor(_Doc):
    """A tensor of an inference rank.

    `direct`: it is written where it lies. `staging`: what is written is a C-contiguous tensor of this shape, out of
    which a step of the engine makes what it uses (shuffled, packed); `fallback` is made by us, see EngineTable.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  #: bytes
    dtype: str
    address: int = Field(
        default=0, ge=0, lt=1 << 63
    )  #: in the rank's process; 0: not known, so it shares no memory with any other
    layout: Layout = "direct"
    quant: Quant | None = None
    #: boxes (start, size) that no parameter fills, e.g. padding of the vocabulary: they are left alone
    keep: tuple[tuple[_Axes, _Axes], ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        item = itemsize_of(self.dtype)
        if len(self.shape) != len(self.strides):
            raise ValueError(f"{self.name}: {len(self.shape)} axes, {len(self.strides)} strides")
        _within(self.name, self.shape, self.strides, item)
        return self


class Entry(_Doc):
    """A box of a parameter, and the box of a tensor that takes it. The parameter's axis d is the tensor's `axes[d]`.

    An axis of the parameter that the tensor does not have (an expert of a 3-D parameter) is -1 and has size 1; an axis
    of the tensor that the parameter does not have has extent 1 in the box.
    """

    param: str
    start: _Axes  #: in the parameter
    size: _Axes
    tensor: str
    at: _Axes  #: in the tensor
    axes: _Axes = ()  #: empty: the last axes of the tensor, in order


class EngineTable(_Doc):
    """What one inference rank wants."""

    rank: int = Field(ge=0, lt=1 << 24)
    tensors: tuple[Tensor, ...]
    entries: tuple[Entry, ...]
    #: parameters that no entry could be recorded for -> why: they are delivered whole, for the engine's own loader
    fallback: dict[str, str] = {}


def read_tables(path: Path, kind: type[TrainerTable] | type[EngineTable]) -> list[TrainerTable] | list[EngineTable]:
    """Read a JSON list of tables. Raises ConfigError that names the file and what is wrong."""
    from pydantic import TypeAdapter

    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_JSON:
        raise ConfigError(f"{path}: more than {MAX_JSON} bytes")
    try:
        return TypeAdapter(list[kind]).validate_json(data)  # type: ignore[valid-type]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {where}: {first['msg']} ({error.error_count()} problems)") from None
