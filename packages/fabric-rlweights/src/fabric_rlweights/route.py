"""What one trainer rank has to do in every update: its part of the plan, in the form in which it travels."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from fabric_core import ProtocolError
from fabric_rlweights.boxes import Ints, intersect, join, volume
from fabric_rlweights.exchange import block_boxes
from fabric_rlweights.plan import BLOCK, PER_TENSOR, Plan, own_blocks

__all__ = ["Route", "pack", "route_of", "unpack"]


class Packed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array of int64 on the wire."""

    shape: tuple[int, ...]
    data: bytes


def pack(array: NDArray[np.int64]) -> Packed:
    """Return the wire form."""
    return Packed(array.shape, np.ascontiguousarray(array, "<i8").tobytes())


def unpack(packed: Packed) -> Ints:
    """Read the wire form. Raises ProtocolError if the bytes do not fit the shape."""
    count = 1
    for extent in packed.shape:
        count *= extent
    if any(extent < 0 for extent in packed.shape) or count * 8 != len(packed.data):
        raise ProtocolError(f"an array of shape {packed.shape} in {len(packed.data)} bytes")
    return np.frombuffer(packed.data, "<i8").reshape(packed.shape).astype(np.int64)


@dataclass
class Route:
    """Columns: one row for each piece of this rank. [n], or [n, D] where it says so."""

    buffer: Ints
    offset: Ints  #: of the piece's first element in the buffer, bytes
    stride: Ints  #: [n, D]
    source: Ints  #: element type there
    start: Ints  #: in the parameter, [n, D]
    size: Ints  #: [n, D]
    op: Ints
    copied: Ints
    run: Ints
    writes: Ints
    receiver: Ints
    tensor: Ints  #: its number at the receiver
    at: Ints  #: offset in the tensor, bytes
    step: Ints  #: strides there, [n, D]
    target: Ints  #: element type there
    block: Ints
    scales: Ints  #: number of the tensor of scales, -1: none
    scale_writes: Ints
    scale_at: Ints  #: of the first scale that this piece writes
    scale_step: Ints  #: [n, D]
    own_start: Ints  #: the blocks whose scales it writes, [n, D]
    own_size: Ints  #: [n, D]
    touch_start: Ints  #: the blocks that it touches, [n, D]
    touch_size: Ints  #: [n, D]
    key: Ints  #: pieces with the same one may share scales
    # the exchange of magnitudes
    out: Ints  #: [m, 5]: piece (row above), receiver's rank, floats, offset in the buffer sent, in the receiver's
    into: Ints  #: [k, 4]: sender's rank, floats, offset in the buffer that is received, key
    into_start: Ints  #: [k, D]
    into_size: Ints  #: [k, D]

    def to_wire(self) -> dict[str, Packed]:
        """Return the wire form."""
        return {name: pack(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_wire(cls, columns: dict[str, Packed]) -> Route:
        """Read the wire form. Raises ProtocolError."""
        wanted = set(cls.__dataclass_fields__)
        if set(columns) != wanted:
            raise ProtocolError(
                f"a route without {sorted(wanted - set(columns))}, with {sorted(set(columns) - wanted)}"
            )
        route = cls(**{name: unpack(packed) for name, packed in columns.items()})
        rows = {len(getattr(route, name)) for name in wanted if not name.startswith(("out", "into"))}
        if len(rows) > 1:
            raise ProtocolError(f"a route whose columns have {sorted(rows)} rows")
        return route

    def __len__(self) -> int:
        return len(self.buffer)

    @property
    def receivers(self) -> list[int]:
        """The inference ranks that this rank writes to."""
        return np.unique(self.receiver).tolist()  # type: ignore[no-any-return]

    @property
    def senders(self) -> list[int]:
        """The trainer ranks whose magnitudes it waits for."""
        return np.unique(self.into[:, 0]).tolist()  # type: ignore[no-any-return]

    def shared(self) -> Ints:
        """Return the pieces whose scales depend on others too: those that another piece, anybody's, may share."""
        whole = self.op == PER_TENSOR
        inner = (self.op == BLOCK) & ((self.own_start != self.touch_start) | (self.own_size != self.touch_size)).any(1)
        keys = np.concatenate([self.key[whole | inner], self.into[:, 3]])
        # a piece that holds the first row of a block may lack its last ones: look at everything with such a key
        return np.flatnonzero((self.op >= BLOCK) & np.isin(self.key, keys))

    def partners(self, mine: Ints) -> list[tuple[Ints, Ints]]:
        """Return [(row in `mine`, other)]: others are rows of `mine`, then those of `into`, that share a block."""
        start = np.concatenate([self.touch_start[mine], self.into_start])
        size = np.concatenate([self.touch_size[mine], self.into_size])
        key = np.concatenate([self.key[mine], self.into[:, 3]])
        order = np.argsort(key, kind="stable")
        found = []
        for i, j in join(self.key[mine], key[order]):
            other = order[j]
            both = intersect(start[i], size[i], start[other], size[other])[1]
            keep = (volume(both) > 0) & (i != other)
            found.append((i[keep], other[keep]))
        return found


def route_of(plan: Plan, rank: int) -> Route:
    """Return what a trainer rank does."""
    rows = np.flatnonzero(plan.trainer == rank)
    pieces = plan.pieces.take(rows)
    wants, tensors, held = plan.destination.wants, plan.destination.tensors, plan.held.take(pieces.held)
    tensor = wants.tensor[pieces.want]
    start, size = block_boxes(plan.pieces, plan.destination)
    own_start, own_size = own_blocks(pieces, plan.destination)
    block = np.maximum(tensors.block[tensor], 1)[:, None]
    first = wants.start[pieces.want].copy()
    first[:, -2:] //= block
    whole = (pieces.op == PER_TENSOR)[:, None]
    scale_step = np.where(whole, 0, wants.scale_stride[pieces.want])
    keys = np.where(plan.pieces.op == PER_TENSOR, len(wants) + plan.tensor, plan.pieces.want)
    exchange, number = plan.exchange, np.full(len(plan.pieces), -1, np.int64)
    number[rows] = np.arange(len(rows))
    sent, got = exchange.take(exchange.sender == rank), exchange.take(exchange.receiver == rank)
    return Route(
        buffer=held.buffer,
        offset=held.offset + ((pieces.start - held.start) * held.stride).sum(axis=1),
        stride=held.stride,
        source=np.array(plan.params.dtypes, np.int64)[wants.param[pieces.want]],
        start=pieces.start,
        size=pieces.size,
        op=pieces.op,
        copied=pieces.copied,
        run=pieces.run,
        writes=pieces.writes,
        receiver=tensors.rank[tensor],
        tensor=tensors.number[tensor],
        at=wants.offset[pieces.want]
        + ((pieces.start - wants.start[pieces.want]) * wants.stride[pieces.want]).sum(axis=1),
        step=wants.stride[pieces.want],
        target=tensors.dtype[tensor],
        block=tensors.block[tensor],
        scales=np.where(tensors.scales[tensor] >= 0, tensors.number[tensors.scales[tensor]], -1),
        scale_writes=pieces.scale_writes,
        scale_at=wants.scale_offset[pieces.want] + np.where(whole, 0, (own_start - first) * scale_step).sum(axis=1),
        scale_step=scale_step,
        own_start=np.where(whole, 0, own_start),
        own_size=np.where(whole, 1, own_size),
        touch_start=start[rows],
        touch_size=size[rows],
        key=keys[rows],
        out=np.column_stack([number[sent.piece], sent.receiver, sent.floats, sent.out, sent.into]).reshape(-1, 5),
        into=np.column_stack([got.sender, got.floats, got.into, keys[got.piece]]).reshape(-1, 4),
        into_start=start[got.piece],
        into_size=size[got.piece],
    )
