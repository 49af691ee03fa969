"""The static routing table: for every box that an inference rank wants, which trainer rank writes which part of it.

    plan = make_plan(params, held, destination(tables, params))      # raises ConfigError naming what nobody holds
    plan.proof                                                       # every byte exactly once, as checked

Made once, used unchanged for every update. All arithmetic is on columns: the time grows with the number of pieces, not
with bytes or pairs of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fabric_core import ConfigError
from fabric_rlweights.balance import choose
from fabric_rlweights.boxes import Ints, intersect, join, ragged, volume
from fabric_rlweights.cells import Cells, make_cells
from fabric_rlweights.columns import QUANTS, Columns, Held, Params
from fabric_rlweights.dtypes import NAMES, itemsize_of
from fabric_rlweights.exchange import Exchange, make_exchange
from fabric_rlweights.moves import runs
from fabric_rlweights.proof import Proof, prove
from fabric_rlweights.tables import Destination

__all__ = ["ASIS", "BLOCK", "CAST", "PER_TENSOR", "Options", "Pieces", "Plan", "make_plan"]

ASIS, CAST, BLOCK, PER_TENSOR = range(4)  #: what is done to a piece on its way
ITEMSIZES = np.array([itemsize_of(name) for name in NAMES], np.int64)


@dataclass(frozen=True)
class Options:
    """Choices of the planner.

    Attributes:
        piece_bytes: a piece that is packed, cast or shared by replicas is at most so large: it bounds the temporary
            memory of one piece from below (see `Plan.least_watermark`), and how evenly replicas share.
        pages_from: what lies as runs of at least so many bytes on both sides is written as pages, without a copy.
    """

    piece_bytes: int = 16 << 20
    pages_from: int = 2048

    def __post_init__(self) -> None:
        if not (0 < self.piece_bytes < 1 << 62 and 0 < self.pages_from < 1 << 62):
            raise ConfigError(f"{self}: both are numbers of bytes, from 1 on and below 2**62")


@dataclass
class Pieces(Columns):
    """Parts of wants that one trainer rank writes."""

    want: Ints
    cell: Ints
    start: Ints  #: in the parameter, [n, D]
    size: Ints
    op: Ints  #: ASIS, CAST, BLOCK, PER_TENSOR
    held: Ints  #: the row of `Plan.held` that it is read from
    copied: Ints  #: 1: through temporary memory; 0: straight out of the trainer's parameter
    run: Ints  #: bytes of each write
    writes: Ints  #: how often it raises the immediate with data
    scale_writes: Ints  #: and with scales


@dataclass
class Plan:
    """Who writes what where. Made by `make_plan`."""

    params: Params
    cells: Cells
    destination: Destination
    options: Options
    pieces: Pieces
    exchange: Exchange
    trainers: tuple[int, ...]
    proof: Proof

    @property
    def held(self) -> Held:
        """What the trainers hold, in the order of cells."""
        return self.cells.held

    @property
    def trainer(self) -> Ints:
        """The trainer rank of each piece."""
        return self.held.rank[self.pieces.held]

    @property
    def tensor(self) -> Ints:
        """The destination tensor of each piece."""
        return self.destination.wants.tensor[self.pieces.want]

    @property
    def receiver(self) -> Ints:
        """The inference rank of each piece."""
        return self.destination.tensors.rank[self.tensor]

    @property
    def nbytes(self) -> Ints:
        """Bytes that each piece takes on the wire, scales left out."""
        return volume(self.pieces.size) * ITEMSIZES[self.destination.tensors.dtype[self.tensor]]

    @property
    def receivers(self) -> tuple[int, ...]:
        """The inference ranks."""
        return tuple(np.unique(self.destination.tensors.rank).tolist())

    def expected(self, receiver: int) -> int:
        """Return how often an inference rank's immediate is raised in an update."""
        mine = self.receiver == receiver
        return int(self.pieces.writes[mine].sum() + self.pieces.scale_writes[mine].sum())


def make_plan(
    params: Params,
    held: Held,
    destination: Destination,
    *,
    options: Options | None = None,
    without: frozenset[int] = frozenset(),
) -> Plan:
    """Make the routing table, and prove it.

    Args:
        without: trainer ranks that are not to be used (they are lost); replicas take over what they can.

    Raises:
        ConfigError: something is wanted that no trainer holds, or two things go to one place; the text names both.
    """
    options = options or Options()
    if without:
        held = held.take(~np.isin(held.rank, sorted(without)))
    cells = make_cells(held)
    pieces = _cut_up(params, cells, destination, options)
    ranks = int(held.rank.max(initial=-1)) + 1
    tensor = destination.wants.tensor[pieces.want]
    out = volume(pieces.size) * ITEMSIZES[destination.tensors.dtype[tensor]]
    pieces.held = choose(pieces.cell, out, cells.first, cells.held.rank, ranks)
    _shape(pieces, cells, destination, params, options)
    proof = prove(params, cells, destination, pieces, frozenset(without))
    exchange = make_exchange(pieces, cells.held.rank[pieces.held], destination, params)
    trainers = tuple(np.unique(held.rank).tolist())
    return Plan(params, cells, destination, options, pieces, exchange, trainers, proof)


def _cut_up(params: Params, cells: Cells, destination: Destination, options: Options) -> Pieces:
    """Intersect wants with cells, and cut what is too long."""
    wants, found = destination.wants, []
    for want, cell in join(wants.param, cells.param):
        start, size = intersect(wants.start[want], wants.size[want], cells.start[cell], cells.size[cell])
        rows = np.flatnonzero((size > 0).all(axis=1))
        found.append((want[rows], cell[rows], start[rows], size[rows]))
    if not found:
        raise ConfigError("there is nothing to move: no tensor of an inference rank is made of any parameter")
    want, cell, start, size = (np.concatenate([part[k] for part in found]) for k in range(4))
    tensors, tensor = destination.tensors, wants.tensor[want]
    source = np.array(params.dtypes, np.int64)[wants.param[want]]
    quant = tensors.quant[tensor]
    plain = np.where(source == tensors.dtype[tensor], ASIS, CAST)
    op = np.where(quant == QUANTS.index("block"), BLOCK, np.where(quant == QUANTS.index("tensor"), PER_TENSOR, plain))
    grain = np.where(op == BLOCK, tensors.block[tensor], 1)
    want, cell, start, size, op = _split(want, cell, start, size, op, grain, ITEMSIZES[tensors.dtype[tensor]], options)
    zero = np.zeros(len(want), np.int64)
    return Pieces(want, cell, start, size, op, zero, zero, zero, zero, zero)


def _split(
    want: Ints, cell: Ints, start: Ints, size: Ints, op: Ints, grain: Ints, item: Ints, options: Options
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Cut along the outermost axis that has an extent, until every piece is small enough or one element (or block).

    Quantised pieces are cut between blocks only: `grain` is the step on the last two axes.
    """
    axes = start.shape[1]
    for axis in range(axes):
        long = volume(size) * item > options.piece_bytes
        step_of = grain if axis >= axes - 2 else np.ones_like(grain)
        rest = volume(size) // np.maximum(size[:, axis], 1) * item  # bytes of one index of this axis
        step = np.maximum(options.piece_bytes // np.maximum(rest, 1) // step_of, 1) * step_of
        begin, end = start[:, axis], start[:, axis] + size[:, axis]
        base = begin // step_of * step_of  # blocks are counted from the parameter's begin
        parts = np.where(long, -(-(end - base) // step), 1)
        if (parts == 1).all():
            continue
        owner, item_number = ragged(parts)
        low = np.maximum(base[owner] + item_number * step[owner], begin[owner])
        high = np.where(
            parts[owner] == 1, end[owner], np.minimum(base[owner] + (item_number + 1) * step[owner], end[owner])
        )
        want, cell, op, grain, item = want[owner], cell[owner], op[owner], grain[owner], item[owner]
        start, size = start[owner].copy(), size[owner].copy()
        low = np.where(parts[owner] == 1, begin[owner], low)
        start[:, axis], size[:, axis] = low, high - low
    return want, cell, start, size, op


def _shape(pieces: Pieces, cells: Cells, destination: Destination, params: Params, options: Options) -> None:
    """Decide how each piece is written, which fixes how many immediates it raises."""
    wants = destination.wants
    tensor = wants.tensor[pieces.want]
    item = ITEMSIZES[destination.tensors.dtype[tensor]]
    theirs = wants.stride[pieces.want]
    mine = cells.held.stride[pieces.held]
    far = runs(pieces.size, item, theirs)
    common = runs(pieces.size, item, mine, theirs)
    total = volume(pieces.size) * item
    straight = (pieces.op == ASIS) & ((common == total) | (common >= options.pages_from) | (common == far))
    pieces.copied = np.where(straight, 0, 1)
    pieces.run = np.where(straight, common, far)
    pieces.writes = total // pieces.run
    pieces.scale_writes = _scale_writes(pieces, destination, params)


def _scale_writes(pieces: Pieces, destination: Destination, params: Params) -> Ints:
    """A piece writes the scales of the blocks whose first element it holds."""
    wants = destination.wants
    size = np.where((pieces.op == BLOCK)[:, None], own_blocks(pieces, destination)[1], 0)
    stride = wants.scale_stride[pieces.want]
    four = np.full(len(size), 4, np.int64)
    count = volume(size)
    blocks = np.where(count > 0, count * 4 // runs(size, four, stride), 0)
    first = (pieces.start == wants.start[pieces.want]).all(axis=1)
    tensor = wants.tensor[pieces.want]
    lead = np.zeros(len(tensor), dtype=bool)  # of the tensor's wants the first one carries its scale
    lead[:] = pieces.want == first_want(destination)[tensor]
    return np.where(pieces.op == PER_TENSOR, (first & lead).astype(np.int64), blocks)


def first_want(destination: Destination) -> Ints:
    """Return for each tensor the first of its wants."""
    found = np.full(len(destination.tensors), -1, np.int64)
    wants = destination.wants.tensor
    found[wants[::-1]] = np.arange(len(wants))[::-1]
    return found


def own_blocks(pieces: Pieces, destination: Destination) -> tuple[Ints, Ints]:
    """Return the box of blocks, counted in the parameter, whose first element lies in each piece: start, size.

    On the last two axes an index counts blocks, on the others elements.
    """
    tensor = destination.wants.tensor[pieces.want]
    block = np.maximum(destination.tensors.block[tensor], 1)[:, None]
    start, end = pieces.start.copy(), pieces.start + pieces.size
    start[:, -2:] = -(-start[:, -2:] // block)
    end[:, -2:] = -(-end[:, -2:] // block)
    return start, end - start
