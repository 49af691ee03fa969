"""An engine's table from its own loaders: they run once on tensors without memory, and what they copy is written down.

    with Recorder(params={"model.q_proj.weight": ((4096, 4096), "bfloat16"), ...}) as recorder:
        for name, tensor in recorder.weights():
            model.load_weights([(name, tensor)])      # the engine's, unchanged
    table = recorder.table(rank, dict(model.named_parameters()))

A loader may cut, index, transpose and reshape what it is given, as long as torch makes views of that; each `copy_` from
such a view into a parameter's memory becomes entries. Anything else done to a weight (arithmetic, a copy of it), or to
where it was copied to, makes that weight a fall-back: it is delivered whole, to `Hooks.load`; and with it every other
weight of the same tensor, since a tensor is written whole or not at all. Needs torch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from fabric_core import ConfigError
from fabric_rlweights.copies import Copy, alike, entries_of, owner_of
from fabric_rlweights.dtypes import name_of, torch_dtype
from fabric_rlweights.memory import tensor_of
from fabric_rlweights.meta import EngineTable, Entry, Layout, Quant

__all__ = ["Recorder"]

_VIEWS = {
    "alias", "as_strided", "detach", "diagonal", "expand", "lift_fresh", "narrow", "permute", "select", "slice",
    "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "_unsafe_view",
    "chunk", "_reshape_alias", "movedim", "swapaxes", "unflatten", "flatten",
}  # fmt: skip


class Recorder:
    """Records copies of views of weights. A context manager, around the loader's calls."""

    def __init__(self, params: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """`params`: the checkpoint's (that is, the trainer's) names, with shape and element type."""
        self._params = dict(params)
        self._copies: dict[Copy, None] = {}  # in their order, each once
        self._failed: dict[str, str] = {}
        self._places: dict[int, list[tuple[int, int, str]]] = {}  # storage -> (first byte, end, weight) copied there
        self._longest: dict[int, int] = {}  # of those
        self._touched: list[tuple[str, int]] = []  # (a weight that falls back, an address that its loader writes to)
        self._storage: dict[int, str] = {}  # of weights that are loaded -> name
        self._spoilt: dict[int, str] = {}  # of tensors that were computed from weights
        self._kept: list[Any] = []
        self._mode: Any = None

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor on the meta device) for each weight, to be given to the loader."""
        import torch

        for name, (shape, dtype) in self._params.items():
            tensor = torch.empty(shape, dtype=torch_dtype(dtype), device="meta")
            self._storage[tensor.untyped_storage()._cdata] = name
            self._kept.append(tensor)  # its storage must not be given to another one
            yield name, tensor

    def failed(self, name: str, reason: str) -> None:
        """Make a weight a fall-back: for loaders that raise."""
        self._failed.setdefault(name, reason)

    def __enter__(self) -> Recorder:
        from torch.utils._python_dispatch import TorchDispatchMode

        recorder = self

        class Mode(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return recorder._seen(func, args, kwargs or {})

        self._mode = Mode()
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)

    def _weight(self, value: Any) -> str | None:
        if hasattr(value, "untyped_storage") and getattr(value, "is_meta", False):
            return self._storage.get(value.untyped_storage()._cdata)
        return None

    def _seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.__name__.partition(".")[0]
        flat = [a for arg in args for a in (arg if isinstance(arg, list | tuple) else [arg])]
        weights = [found for found in map(self._weight, flat) if found is not None]
        spoilt = [found for found in map(self._made_of, flat) if found is not None]
        written = [value for value in _written(func, args, kwargs) if not value.is_meta]
        if not weights and not spoilt:
            self._changed(name, written)
            return func(*args, **kwargs)
        if name == "copy_" and not args[0].is_meta:  # there is nothing to copy: it is only written down
            if weights and args[1] is not args[0] and self._weight(args[1]):
                self._copied(weights[0], args[0], args[1])
            self._touched += [(weight, int(args[0].data_ptr())) for weight in spoilt]
            return args[0]
        if written:
            self._touched += [(weight, int(value.data_ptr())) for weight in weights + spoilt for value in written]
            for weight in weights:
                self._failed.setdefault(weight, f"its loader calls {name}, which is no view")
        result = func(*args, **kwargs)
        if name in _VIEWS and not spoilt:
            return result
        for weight in weights:
            self._failed.setdefault(weight, f"its loader calls {name}, which is no view")
        for value in result if isinstance(result, list | tuple) else [result]:
            if getattr(value, "is_meta", False) and self._weight(value) is None:
                self._spoilt[value.untyped_storage()._cdata] = (weights + spoilt)[0]
                self._kept.append(value)
        return result

    def _changed(self, name: str, written: list[Any]) -> None:
        """The engine writes to memory: weights that were copied there before are not what is there any more."""
        for value in written:
            begin = int(value.data_ptr())
            reach = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
            end = begin + (reach + 1) * value.element_size() if value.numel() else begin
            storage = int(value.untyped_storage().data_ptr())
            places = self._places.get(storage, [])
            low = bisect.bisect_left(places, (begin - self._longest.get(storage, 0), 0, ""))
            for first, last, param in places[low : bisect.bisect_left(places, (end, 0, ""))]:
                if first < end and begin < last:
                    self._failed.setdefault(param, f"its loader calls {name} on what it was copied to")

    def _made_of(self, value: Any) -> str | None:
        """The weight that a tensor was computed from: no view of it, so what happens to it is not followed."""
        if hasattr(value, "untyped_storage") and getattr(value, "is_meta", False):
            return self._spoilt.get(value.untyped_storage()._cdata)
        return None

    def _copied(self, weight: str, there: Any, here: Any) -> None:
        here = here.expand(there.shape)
        copy = Copy(
            weight, int(here.storage_offset()), tuple(here.shape), tuple(here.stride()), int(there.data_ptr()),
            tuple(step * there.element_size() for step in there.stride()), name_of(here.dtype), name_of(there.dtype),
        )  # fmt: skip
        if copy in self._copies:
            return
        self._changed("copy_", [there])
        self._copies[copy] = None
        storage, (begin, end) = int(there.untyped_storage().data_ptr()), copy.span
        bisect.insort(self._places.setdefault(storage, []), (begin, end, weight))
        self._longest[storage] = max(self._longest.get(storage, 0), end - begin)

    # ---- the table

    def table(
        self,
        rank: int,
        tensors: Mapping[str, Any],
        *,
        layouts: Mapping[str, Layout] | None = None,
        quant: Mapping[str, Quant] | None = None,
        keep: Mapping[str, Any] | None = None,
    ) -> EngineTable:
        """Return the table of the engine's tensors that anything was copied to.

        Args:
            tensors: name -> live tensor, of the CPU or a GPU. Two names for one memory are two names of one tensor.
            layouts: those that the engine makes out of a loadable copy; keep: boxes that nothing fills.

        Raises ConfigError: a copy went to memory that none of them has.
        """
        described = {
            name: tensor_of(
                name,
                value,
                layout=(layouts or {}).get(name, "direct"),
                quant=(quant or {}).get(name),
                keep=tuple((keep or {}).get(name, ())),
            )
            for name, value in tensors.items()
        }
        spans = sorted(
            (tensor.address, tensor.address + value.untyped_storage().nbytes(), name)
            for (name, tensor), value in zip(described.items(), tensors.values(), strict=True)
        )
        entries: list[Entry] = []
        touched: dict[str, set[str]] = {}  # tensor -> weights that belong there
        for copy in self._copies:
            owner = owner_of(spans, copy.address)
            if owner is None:
                if copy.param in self._failed:
                    continue
                raise ConfigError(f"rank {rank}: {copy.param} is copied to {copy.address:#x}, which no tensor has")
            touched.setdefault(owner, set()).add(copy.param)
            same = alike(copy, self._params[copy.param][1], described[owner].dtype)
            found = entries_of(same, self._params[copy.param], described[owner]) if same else None
            if found is None:
                what = "no set of boxes" if same else f"of {copy.source} into {copy.target}, viewed so"
                self._failed.setdefault(copy.param, f"its loader's copy is {what}")
            else:
                entries += found
        for weight, address in self._touched:
            owner = owner_of(spans, address)
            if owner is not None:
                touched.setdefault(owner, set()).add(weight)
        self._spread(touched)
        entries = [entry for entry in entries if entry.param not in self._failed]
        loaded = {copy.param for copy in self._copies}
        for name in self._params.keys() - loaded - self._failed.keys():
            self._failed[name] = "its loader copied nothing"
        used = {entry.tensor for entry in entries} | {q.scales for q in (quant or {}).values()}
        addresses = {described[name].address for name in used}
        chosen = tuple(t for name, t in described.items() if name in used or t.address in addresses)
        return EngineTable(rank=rank, tensors=chosen, entries=tuple(entries), fallback=dict(self._failed))

    def _spread(self, touched: Mapping[str, set[str]]) -> None:
        """A tensor of which one weight falls back is the loader's: so do the others, wherever else they go."""
        going = True
        while going:
            going = False
            for tensor, weights in touched.items():
                cause = next((weight for weight in sorted(weights) if weight in self._failed), None)
                for weight in weights - self._failed.keys() if cause else ():
                    self._failed[weight] = f"it shares {tensor} with {cause}, which falls back"
                    going = True


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an operation writes to, as its schema says."""
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, list | tuple) else [value]
    return [value for value in found if hasattr(value, "data_ptr")]
