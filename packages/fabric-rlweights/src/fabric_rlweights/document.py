"""The plan as a document: saved, read again, compared, explained. Columns travel as compressed base64."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from fabric_core import ConfigError
from fabric_rlweights.boxes import Ints, volume
from fabric_rlweights.columns import LAYOUTS
from fabric_rlweights.dtypes import NAMES
from fabric_rlweights.plan import Plan

__all__ = ["Change", "Changes", "Column", "Explained", "PlanDocument", "Rank", "Route"]

SCHEMA = "fabric.rl.plan/1"
MAX_BYTES = 1 << 32
OPS = ("as it is", "cast", "fp8 by blocks", "fp8 by tensors")
_COLUMNS = ("param", "trainer", "tensor", "start", "size", "op", "copied", "writes", "replicas")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Column(_Model):
    """An array of integers."""

    dtype: str
    shape: tuple[int, ...]
    data: str

    @classmethod
    def of(cls, array: Ints) -> Column:
        """Pack an array in the smallest type that holds it."""
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        kinds = ("<i1", "<i2", "<i4", "<i8")
        kind = next(k for k in kinds if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
        packed = zlib.compress(np.ascontiguousarray(array.astype(kind)).tobytes(), 1)
        return cls(dtype=kind, shape=array.shape, data=base64.b64encode(packed).decode())

    def array(self) -> Ints:
        """Unpack it. Raises ConfigError if it is damaged."""
        try:
            count = int(np.prod(self.shape, dtype=np.int64))
            itemsize = np.dtype(self.dtype).itemsize
            data = zlib.decompressobj().decompress(base64.b64decode(self.data), count * itemsize + 1)
            return np.frombuffer(data, self.dtype).reshape(self.shape).astype(np.int64)
        except (ValueError, TypeError, zlib.error) as error:
            raise ConfigError(f"a column of the plan is damaged: {error}") from None


class Rank(_Model):
    """What a rank sends or receives in an update."""

    rank: int
    bytes: int
    writes: int


class Route(_Model):
    """A box of a parameter: from where to where."""

    trainer: int
    replicas: int  #: trainers that could send it
    receiver: int
    tensor: str
    layout: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    how: str
    straight: bool  #: out of the parameter's memory
    writes: int


class Explained(_Model):
    """Everything about one parameter, or one tensor of the inference side."""

    name: str
    kind: str  #: "parameter" or "tensor"
    shape: tuple[int, ...] | None
    dtype: str | None
    routes: list[Route]
    bytes: int
    fused_with: list[str]  #: what else goes into the same tensors
    why_not_direct: list[str]


class Change(_Model):
    """A parameter whose routes differ between two plans."""

    param: str
    before: int  #: boxes
    after: int
    moved_bytes: int  #: that another trainer sends, or that go elsewhere


class Changes(_Model):
    """What another plan routes otherwise."""

    params: list[Change]


class PlanDocument(_Model):
    """A plan. `routes` has a row for each piece; the rest is what people ask first."""

    schema_: str = SCHEMA
    trainers: list[Rank]
    receivers: list[Rank]
    bytes: int
    classes: dict[str, int]  #: direct, staging, fallback: bytes of destination tensors
    straight_bytes: int
    proof: dict[str, int]
    params: list[str]
    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    tensors: list[str]
    tensor_ranks: Column
    tensor_layouts: Column
    item: Column  #: bytes of an element of each tensor
    routes: dict[str, Column]
    aliases: dict[str, str]
    reasons: dict[str, str]

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Make the document of a plan."""
        pieces, nbytes, writes = plan.pieces, plan.nbytes, plan.pieces.writes + plan.pieces.scale_writes
        trainer, receiver, tensors = plan.trainer, plan.receiver, plan.destination.tensors

        def ranks(which: Ints, all_of: tuple[int, ...]) -> list[Rank]:
            top = max([0, *all_of]) + 1
            by = np.bincount(which, weights=nbytes, minlength=top)
            count = np.bincount(which, weights=writes, minlength=top)
            return [Rank(rank=rank, bytes=int(by[rank]), writes=int(count[rank])) for rank in all_of]

        columns = {
            "param": plan.destination.wants.param[pieces.want],
            "trainer": trainer,
            "tensor": plan.tensor,
            "start": pieces.start,
            "size": pieces.size,
            "op": pieces.op,
            "copied": pieces.copied,
            "writes": writes,
            "replicas": (plan.cells.first[1:] - plan.cells.first[:-1])[pieces.cell],
        }
        from fabric_rlweights.plan import ITEMSIZES

        return cls(
            trainers=ranks(trainer, plan.trainers),
            receivers=ranks(receiver, plan.receivers),
            bytes=int(nbytes.sum()),
            classes=plan.proof.bytes,
            straight_bytes=int(nbytes[pieces.copied == 0].sum()),
            proof={
                "tensors": plan.proof.tensors, "elements": plan.proof.elements, "left_alone": plan.proof.left_alone,
                "pieces": plan.proof.pieces,
            },
            params=plan.params.names,
            shapes=plan.params.shapes,
            dtypes=[NAMES[code] for code in plan.params.dtypes],
            tensors=tensors.names,
            tensor_ranks=Column.of(tensors.rank),
            tensor_layouts=Column.of(tensors.layout),
            item=Column.of(ITEMSIZES[tensors.dtype]),
            routes={name: Column.of(column) for name, column in columns.items()},
            aliases=plan.destination.aliases,
            reasons=plan.destination.reasons,
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Write it. Raises ConfigError naming the file."""
        try:
            path.write_text(self.model_dump_json(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read one. Raises ConfigError naming the file and what is wrong."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            found = cls.model_validate_json(data)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"{path} is no plan: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        if found.schema_ != SCHEMA or set(found.routes) != set(_COLUMNS):
            raise ConfigError(f"{path} is no plan of schema {SCHEMA}, but {found.schema_}")
        return found

    def columns(self) -> dict[str, Ints]:
        """Unpack the routes."""
        return {name: column.array() for name, column in self.routes.items()}

    # ---- questions

    def explain(self, name: str) -> Explained:
        """Say where a parameter goes, or what makes a tensor. Raises ConfigError with close names."""
        routes, ranks, layouts = self.columns(), self.tensor_ranks.array(), self.tensor_layouts.array()
        item = self.item.array()
        if name in self.params:
            rows = np.flatnonzero(routes["param"] == self.params.index(name))
            kind, shape, dtype = "parameter", self.shapes[self.params.index(name)], self.dtypes[self.params.index(name)]
        elif name in self.tensors:
            named = [number for number, tensor in enumerate(self.tensors) if tensor == name]
            rows = np.flatnonzero(np.isin(routes["tensor"], named))
            kind, shape, dtype = "tensor", None, None
        else:
            import difflib

            close = difflib.get_close_matches(name, [*self.params, *self.tensors], 3)
            raise ConfigError(f"the plan has no {name!r}{'; close: ' + ', '.join(close) if close else ''}")
        tensors = sorted({self.tensors[int(n)] for n in routes["tensor"][rows]})
        same = np.flatnonzero(np.isin(routes["tensor"], np.unique(routes["tensor"][rows])))
        other = {self.params[int(p)] for p in np.unique(routes["param"][same])} - {name}
        found = [
            Route(
                trainer=int(routes["trainer"][row]),
                replicas=int(routes["replicas"][row]),
                receiver=int(ranks[routes["tensor"][row]]),
                tensor=self.tensors[int(routes["tensor"][row])],
                layout=LAYOUTS[int(layouts[routes["tensor"][row]])],
                start=self._bare(routes["start"][row], int(routes["param"][row])),
                size=self._bare(routes["size"][row], int(routes["param"][row])),
                how=OPS[int(routes["op"][row])],
                straight=not routes["copied"][row],
                writes=int(routes["writes"][row]),
            )
            for row in rows.tolist()
        ]
        why = sorted({f"{key}: {text}" for key, text in self.reasons.items() if key.partition(": ")[2] in tensors})
        nbytes = int((volume(routes["size"][rows]) * item[routes["tensor"][rows]]).sum())
        return Explained(
            name=name, kind=kind, shape=shape, dtype=dtype, routes=found, bytes=nbytes, fused_with=sorted(other),
            why_not_direct=why,
        )  # fmt: skip

    def _bare(self, values: Ints, param: int) -> tuple[int, ...]:
        return tuple(values[len(values) - len(self.shapes[param]) :].tolist()) if self.shapes[param] else ()

    def diff(self, other: PlanDocument) -> list[Change]:
        """Return the parameters that are routed otherwise in `other`."""
        mine, yours = self._by_param(), other._by_param()
        found = []
        for name in sorted(mine.keys() | yours.keys()):
            a, b = mine.get(name, {}), yours.get(name, {})
            if a != b:
                moved = sum(nbytes for key, nbytes in b.items() if a.get(key) != nbytes)
                found.append(Change(param=name, before=len(a), after=len(b), moved_bytes=moved))
        return found

    def _by_param(self) -> dict[str, dict[tuple[object, ...], int]]:
        routes, ranks, item = self.columns(), self.tensor_ranks.array(), self.item.array()
        nbytes = volume(routes["size"]) * item[routes["tensor"]]
        found: dict[str, dict[tuple[object, ...], int]] = {}
        for row in range(len(nbytes)):
            tensor = int(routes["tensor"][row])
            key = (
                int(routes["trainer"][row]), int(ranks[tensor]), self.tensors[tensor],
                tuple(routes["start"][row].tolist()), tuple(routes["size"][row].tolist()),
            )  # fmt: skip
            found.setdefault(self.params[int(routes["param"][row])], {})[key] = int(nbytes[row])
        return found
