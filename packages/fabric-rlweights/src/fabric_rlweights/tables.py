"""From the documents of both sides (meta.py) to columns, with every check that one side's table can be given alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fabric_core import ConfigError
from fabric_rlweights.boxes import Ints
from fabric_rlweights.columns import LAYOUTS, QUANTS, Held, Params, Tensors, Wants, pad
from fabric_rlweights.dtypes import NAMES, code_of, itemsize_of
from fabric_rlweights.meta import EngineTable, Entry, Tensor, TrainerTable, contiguous

__all__ = ["LEAST_RUN", "Destination", "destination", "holdings"]

QUANTISED = ("bfloat16", "float16", "float32")  #: what fp8 can be made of with the same bits on any device
LEAST_RUN = 64  #: bytes: a tensor that takes shorter pieces than this is written to staging memory instead


def holdings(tables: Sequence[TrainerTable]) -> tuple[Params, Held]:
    """Return the parameters and what the trainers hold of them. Raises ConfigError naming ranks that do not agree."""
    axes = max([2, *(len(shard.shape) for table in tables for shard in table.shards)])
    params = Params(axes)
    rows: list[tuple[int, int, int, int]] = []
    boxes: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
    seen: set[int] = set()
    for table in tables:
        if table.rank in seen:
            raise ConfigError(f"two trainer tables are of rank {table.rank}")
        seen.add(table.rank)
        for shard in table.shards:
            number = params.add(shard.param, shard.shape, code_of(shard.dtype))
            if 0 in shard.size:
                continue  # a rank that got nothing of an uneven split
            rows.append((number, table.rank, shard.buffer, shard.offset))
            boxes.append((pad(shard.start, axes, 0), pad(shard.size, axes, 1), pad(shard.strides, axes, 0)))
    flat = np.array(rows, np.int64).reshape(-1, 4)
    box = np.array(boxes, np.int64).reshape(-1, 3, axes)
    return params, Held(flat[:, 0], flat[:, 1], flat[:, 2], box[:, 0], box[:, 1], flat[:, 3], box[:, 2])


@dataclass
class Destination:
    """The inference side."""

    tensors: Tensors
    wants: Wants
    #: boxes that are left alone: the tensor of each, where, how large
    keep: tuple[Ints, Ints, Ints]
    aliases: dict[str, str] = field(default_factory=dict)  #: "rank 0: lm_head.weight" -> the tensor that is written
    reasons: dict[str, str] = field(default_factory=dict)  #: "rank 0: NAME" -> why it is not written directly


def destination(tables: Sequence[EngineTable], params: Params) -> Destination:
    """Return what the inference ranks want. Raises ConfigError naming tensor and rank for what makes no sense."""
    maker = _Maker(params, max([params.axes, *(len(t.shape) for table in tables for t in table.tensors)]))
    seen: set[int] = set()
    for table in tables:
        if table.rank in seen:
            raise ConfigError(f"two engine tables are of rank {table.rank}")
        seen.add(table.rank)
        maker.add(table)
    return maker.done()


class _Maker:
    def __init__(self, params: Params, axes: int) -> None:
        self.params, self.axes = params, axes
        self.tensors: list[tuple[int, int, Tensor]] = []
        self.wants: list[tuple[int, int, int, int]] = []  # parameter, tensor, offset, offset of the scales
        self.boxes: list[tuple[tuple[int, ...], ...]] = []  # start, size, stride, stride of the scales
        self.places: list[tuple[tuple[int, ...], ...]] = []  # at, extent
        self.keep: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self.aliases: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def add(self, table: EngineTable) -> None:
        entries: dict[str, list[Entry]] = {}
        for entry in table.entries:
            entries.setdefault(entry.tensor, []).append(entry)
        for name in entries.keys() - {tensor.name for tensor in table.tensors}:
            raise ConfigError(f"rank {table.rank}: an entry names the tensor {name}, which is not in the table")
        tensors: dict[str, Tensor] = {}
        places: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
        scales = {tensor.quant.scales for tensor in table.tensors if tensor.quant}
        for tensor in table.tensors:
            if tensor.name in tensors:
                raise ConfigError(f"rank {table.rank}: two tensors are called {tensor.name}")
            tensors[tensor.name] = tensor
            place = (tensor.address, tensor.shape, tensor.strides)
            if tensor.address and place in places:
                self._alias(table.rank, tensor.name, places[place], entries)
                del tensors[tensor.name]
                continue
            places[place] = tensor.name
            if tensor.name not in entries and tensor.name not in scales:
                raise ConfigError(
                    f"rank {table.rank}: nothing is said about what belongs into {tensor.name}; leave it out of the "
                    "table if no update is to touch it"
                )
        first = len(self.tensors)
        numbers = {}
        for number, tensor in enumerate(tensors.values()):
            numbers[tensor.name] = first + number
            short = self._too_short(table.rank, tensor, entries.get(tensor.name, []))
            if short:
                self.reasons[f"rank {table.rank}: {tensor.name}"] = short
                tensor = tensor.model_copy(update={"layout": "staging"})  # noqa: PLW2901
            if tensor.layout == "staging":
                flat = contiguous(tensor.shape, itemsize_of(tensor.dtype))
                tensor = tensor.model_copy(update={"strides": flat, "address": 0})  # noqa: PLW2901
                self.reasons.setdefault(f"rank {table.rank}: {tensor.name}", "the engine makes it from a loadable copy")
            self.tensors.append((table.rank, number, tensor))
            for start, size in tensor.keep:
                self.keep.append((first + number, pad(start, self.axes, 0), pad(size, self.axes, 1)))
        for name, rows in entries.items():
            for entry in rows:
                self._want(table.rank, numbers, self.tensors[numbers[name]][2], entry)
        for name, reason in table.fallback.items():
            self._whole(table.rank, name, reason, first)

    def _alias(self, rank: int, name: str, other: str, entries: dict[str, list[Entry]]) -> None:
        """Two names for the same memory (tied embeddings): it is written once, by the first one's entries."""
        mine, theirs = entries.pop(name, []), entries.get(other, [])
        bare = [[(e.start, e.size, e.at, e.axes) for e in rows] for rows in (mine, theirs)]
        if mine and theirs and bare[0] != bare[1]:
            raise ConfigError(
                f"rank {rank}: {name} and {other} share memory, but different boxes of parameters belong there"
            )
        if mine and not theirs:
            entries[other] = [entry.model_copy(update={"tensor": other}) for entry in mine]
        self.aliases[f"rank {rank}: {name}"] = other

    def _axes(self, rank: int, tensor: Tensor, entry: Entry) -> tuple[int, ...]:
        n = len(entry.start)
        axes = entry.axes or tuple(range(len(tensor.shape) - n, len(tensor.shape)))
        what = f"rank {rank}: the entry of {entry.param} in {tensor.name}"
        if not len(entry.size) == n == len(axes) or len(entry.at) != len(tensor.shape):
            raise ConfigError(f"{what}: start, size and axes have the parameter's axes, at has the tensor's")
        used = [axis for axis in axes if axis >= 0]
        if len(set(used)) != len(used) or any(axis >= len(tensor.shape) for axis in used):
            raise ConfigError(f"{what}: axes={axes} do not name different axes of {tensor.shape}")
        for axis, count in zip(axes, entry.size, strict=True):
            if axis < 0 and count != 1:
                raise ConfigError(f"{what}: an axis that the tensor does not have is {count} long, it must be 1")
        extent = self._extent(tensor, entry, axes)
        for first, count, whole in zip(entry.at, extent, tensor.shape, strict=True):
            if first < 0 or count < 1 or first + count > whole:
                raise ConfigError(f"{what}: the box {entry.at} + {tuple(extent)} leaves the tensor's {tensor.shape}")
        return axes

    @staticmethod
    def _extent(tensor: Tensor, entry: Entry, axes: tuple[int, ...]) -> list[int]:
        extent = [1] * len(tensor.shape)
        for axis, count in zip(axes, entry.size, strict=True):
            if axis >= 0:
                extent[axis] = count
        return extent

    def _too_short(self, rank: int, tensor: Tensor, entries: list[Entry]) -> str:
        """Say why a tensor cannot be written where it lies, or ''."""
        if tensor.layout != "direct":
            return ""
        item = itemsize_of(tensor.dtype)
        for entry in entries:
            extent = self._extent(tensor, entry, self._axes(rank, tensor, entry))
            run, total = item, item
            pairs = sorted(zip(tensor.strides, extent, strict=True), key=lambda pair: pair[0])
            for stride, count in pairs:
                total *= count
                if run == stride or count == 1:
                    run *= count
            if run < min(LEAST_RUN, total):
                return f"it would be written in pieces of {run} bytes, fewer than {LEAST_RUN}"
        return ""

    def _want(self, rank: int, numbers: dict[str, int], tensor: Tensor, entry: Entry) -> None:
        param = self.params.index.get(entry.param)
        what = f"rank {rank}: {tensor.name} wants {entry.param}"
        if param is None:
            raise ConfigError(f"{what}, which no trainer has; is it tied to another one, or named otherwise?")
        shape = self.params.shapes[param]
        if len(shape) != len(entry.start) or any(
            first < 0 or first + count > whole
            for first, count, whole in zip(entry.start, entry.size, shape, strict=False)
        ):
            raise ConfigError(f"{what} from {entry.start}, {entry.size} long: the parameter's shape is {shape}")
        axes = self._axes(rank, tensor, entry)
        strides = tuple(tensor.strides[axis] if axis >= 0 else 0 for axis in axes)
        offset = sum(first * stride for first, stride in zip(entry.at, tensor.strides, strict=True))
        scale_offset, scale_strides = 0, (0,) * len(axes)
        if tensor.quant is not None:
            if tensor.quant.scales not in numbers:
                raise ConfigError(f"{what}: its scales {tensor.quant.scales} are not in the table")
            scales = self.tensors[numbers[tensor.quant.scales]][2]
            if scales.dtype != "float32":
                raise ConfigError(f"{what}: its scales {scales.name} are {scales.dtype}, must be float32")
            source = NAMES[self.params.dtypes[param]]
            if source not in QUANTISED:
                raise ConfigError(f"{what}, quantised: it is {source}, only {', '.join(QUANTISED)} are quantised")
            if tensor.dtype != "float8_e4m3fn":
                raise ConfigError(f"{what}, quantised: {tensor.dtype} is not served, only float8_e4m3fn")
            if tensor.quant.scheme == "block":
                scale_offset, scale_strides = self._blocks(what, tensor, scales, entry, axes)
        d = self.params.axes
        self.wants.append((param, numbers[tensor.name], offset, scale_offset))
        self.boxes.append((pad(entry.start, d, 0), pad(entry.size, d, 1), pad(strides, d, 0), pad(scale_strides, d, 0)))
        self.places.append((pad(entry.at, self.axes, 0), pad(self._extent(tensor, entry, axes), self.axes, 1)))

    def _blocks(
        self, what: str, tensor: Tensor, scales: Tensor, entry: Entry, axes: tuple[int, ...]
    ) -> tuple[int, tuple[int, ...]]:
        """Return (offset of the first block's scale, stride of the scales for each axis of the parameter)."""
        assert tensor.quant is not None
        block, rank = tensor.quant.block, len(tensor.shape)
        if rank < 2 or len(axes) < 2 or axes[-2:] != (rank - 2, rank - 1):
            raise ConfigError(f"{what}: blocks need the tensor's last two axes to be the parameter's, not {axes}")
        wanted = tuple(-(-extent // block) if axis >= rank - 2 else extent for axis, extent in enumerate(tensor.shape))
        if scales.shape != wanted:
            raise ConfigError(f"{what}: its scales have shape {scales.shape}, blocks of {block} need {wanted}")
        whole = self.params.shapes[self.params.index[entry.param]]
        for axis in (-2, -1):
            first, at, end = entry.start[axis], entry.at[axis], entry.start[axis] + entry.size[axis]
            if first % block or at % block or (end % block and end != whole[axis]):
                raise ConfigError(
                    f"{what}: rows or columns {first}..{end} at {at} are not whole blocks of {block}; give it the "
                    "layout staging and let the engine quantise"
                )
        offset = sum(
            (first // block if axis >= rank - 2 else first) * stride
            for axis, (first, stride) in enumerate(zip(entry.at, scales.strides, strict=True))
        )
        return offset, tuple(scales.strides[axis] if axis >= 0 else 0 for axis in axes)

    def _whole(self, rank: int, name: str, reason: str, first: int) -> None:
        """A parameter of class fall-back: a tensor of ours takes it as it is."""
        param = self.params.index.get(name)
        if param is None:
            raise ConfigError(f"rank {rank}: wants {name} whole, which no trainer has")
        shape, dtype = self.params.shapes[param], NAMES[self.params.dtypes[param]]
        tensor = Tensor(
            name=f"fallback:{name}", shape=shape, strides=contiguous(shape, itemsize_of(dtype)), dtype=dtype,
            address=0, layout="fallback",
        )  # fmt: skip
        self.reasons[f"rank {rank}: {tensor.name}"] = reason
        self.tensors.append((rank, len(self.tensors) - first, tensor))
        zeros = (0,) * len(shape)
        entry = Entry(param=name, start=zeros, size=shape, tensor=tensor.name, at=zeros)
        self._want(rank, {tensor.name: len(self.tensors) - 1}, tensor, entry)

    def done(self) -> Destination:
        d, axes = self.params.axes, self.axes
        index = {(rank, t.name): number for number, (rank, _n, t) in enumerate(self.tensors)}
        rows = [t for _rank, _number, t in self.tensors]

        def ints(values: list[int]) -> Ints:
            return np.array(values, np.int64)

        def wide(values: list[tuple[int, ...]]) -> Ints:
            return np.array(values, np.int64).reshape(len(rows), axes)

        tensors = Tensors(
            names=[t.name for t in rows],
            rank=ints([rank for rank, _n, _t in self.tensors]),
            number=ints([number for _rank, number, _t in self.tensors]),
            shape=wide([pad(t.shape, axes, 1) for t in rows]),
            stride=wide([pad(t.strides, axes, 0) for t in rows]),
            dtype=ints([code_of(t.dtype) for t in rows]),
            layout=ints([LAYOUTS.index(t.layout) for t in rows]),
            quant=ints([QUANTS.index(t.quant.scheme if t.quant else "") for t in rows]),
            scales=ints([index[rank, t.quant.scales] if t.quant else -1 for rank, _n, t in self.tensors]),
            block=ints([t.quant.block if t.quant else 0 for t in rows]),
            address=ints([t.address for t in rows]),
            nbytes=ints(
                [
                    sum((n - 1) * stride for n, stride in zip(t.shape, t.strides, strict=True)) + itemsize_of(t.dtype)
                    for t in rows
                ]
            ),
        )
        flat = np.array(self.wants, np.int64).reshape(-1, 4)
        box = np.array(self.boxes, np.int64).reshape(-1, 4, d)
        place = np.array(self.places, np.int64).reshape(-1, 2, axes)
        wants = Wants(
            flat[:, 0], flat[:, 1], box[:, 0], box[:, 1], flat[:, 2], box[:, 2], place[:, 0], place[:, 1],
            flat[:, 3], box[:, 3],
        )  # fmt: skip
        keep = (
            ints([tensor for tensor, _at, _size in self.keep]),
            np.array([at for _tensor, at, _size in self.keep], np.int64).reshape(-1, axes),
            np.array([size for _tensor, _at, size in self.keep], np.int64).reshape(-1, axes),
        )
        return Destination(tensors, wants, keep, self.aliases, self.reasons)
