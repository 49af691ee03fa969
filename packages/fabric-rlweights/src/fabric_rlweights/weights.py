"""The weights of an inference rank: what is served, what is written to, and how one becomes the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fabric_core import MrDesc, MrHandle, TransferEngine
from fabric_rlweights.digest import MASK, box_digest
from fabric_rlweights.dtypes import itemsize_of
from fabric_rlweights.hooks import Hooks
from fabric_rlweights.memory import Span, copy, fitting, fresh
from fabric_rlweights.meta import EngineTable, contiguous
from fabric_rlweights.protocol import Assign
from fabric_rlweights.route import unpack
from fabric_rlweights.views import bits_view, check_served, on_gpu

__all__ = ["Weights"]


class Weights:
    """Tensors by the numbers of the plan: `now` is served, `next` is written to. Without a double buffer: the same."""

    def __init__(self, engine: TransferEngine, table: EngineTable, memory: Mapping[str, Any], *, double: bool) -> None:
        """Raise KeyError naming a tensor without memory, BadRange naming one whose memory is not as the table says.

        Copies (staging, fall-back) lie where the tensors do: on the GPU, if any is on one.
        """
        self._engine, self.double = engine, double
        direct = {t.name: t for t in table.tensors if t.layout == "direct"}
        missing = sorted(direct.keys() - memory.keys())
        if missing:
            raise KeyError(
                f"no memory is given for {', '.join(missing[:5])} ({len(missing)} tensors of rank {table.rank})"
            )
        self._real = {name: fitting(table.rank, tensor, memory[name]) for name, tensor in direct.items()}
        for name, span in self._real.items():
            check_served(engine, span.device, f"rank {table.rank}: the memory given for {name}")
        self._device = max((span.device for span in self._real.values()), default="cpu")  # "cuda:0" is above "cpu"
        self._pairs: dict[str, tuple[Span, Span]] = {}  # (served, written to) by name, whatever the plan's numbers are
        self._tables = {t.name: t for t in table.tensors}
        self.names: list[str] = []
        self.now: list[Span] = []
        self.next: list[Span] = []
        self._staging: dict[int, tuple[int, str]] = {}
        self._boxes: dict[str, Any] = {}
        self._handles: list[MrHandle] = []
        self._descs: list[MrDesc] = []
        self.filled = False  #: copies (staging, fall-back) are of the version that is served

    def enter(self) -> None:
        """Have the calling thread use the GPU that the weights lie on: hooks and their kernels expect it."""
        if self._device != "cpu":
            import torch

            torch.cuda.set_device(self._device)

    @property
    def bytes_now(self) -> dict[str, Any]:
        """What is served, by name, not copied: numpy arrays, of a GPU's memory torch tensors, of uint8."""
        return {name: span.bytes() for name, span in zip(self.names, self.now, strict=True)}

    def take_up(self, message: Assign) -> None:
        """Have memory for everything that the plan writes here, and register it.

        What was there under an earlier plan stays what it is: which of two buffers is served, and what copies hold.
        """
        boxes = {name: unpack(packed) for name, packed in message.columns.items()}
        pairs = [
            self._pair(name, message.staging[number][0] if number in message.staging else -1)
            for number, name in enumerate(message.names)
        ]
        self._pairs.update(zip(message.names, pairs, strict=True))
        self.names, self._staging, self._boxes = message.names, message.staging, boxes
        self.now, self.next = [now for now, _next in pairs], [new for _now, new in pairs]
        self.settle()
        self.register()

    def settle(self) -> None:
        """Wait until a GPU has done what this thread gave it, hooks' kernels above all."""
        for device in sorted({span.device for span in [*self.now, *self._real.values()]} - {"cpu"}):
            import torch

            torch.cuda.current_stream(device).synchronize()

    def _pair(self, name: str, copied: int) -> tuple[Span, Span]:
        """Return (served, written to) of a tensor; `copied`: the bytes of its loadable copy, -1: written directly."""
        nbytes = self._real[name].nbytes if copied < 0 else copied
        known = self._pairs.get(name)
        if known is not None and known[0].nbytes == nbytes:
            return known
        if copied >= 0:
            self.filled = False
            one = fresh(self._engine, nbytes, self._device)
            return one, one
        real = self._real[name]
        if not self.double:
            return real, real
        second = fresh(self._engine, nbytes, real.device)
        copy(second, real)  # what no parameter fills must be in both
        return real, second

    def register(self) -> None:
        """Register what is written to; what was registered before cannot be reached any more."""
        self.close()
        made = [self._engine.reg_mr(span.registered) for span in self.next]
        self._handles, self._descs = [handle for handle, _ in made], [desc for _, desc in made]

    def descs(self) -> dict[int, bytes]:
        """The descriptors of what is written to, by number."""
        return {number: desc.to_bytes() for number, desc in enumerate(self._descs)}

    def close(self) -> None:
        """Deregister."""
        for handle in self._handles:
            handle.close()
        self._handles = []

    def exchange(self) -> None:
        """Serve what was written. Afterwards, `register`."""
        self.now, self.next = self.next, self.now
        self._pairs.update(zip(self.names, zip(self.now, self.next, strict=True), strict=True))

    @property
    def donates(self) -> bool:
        """Whether what lies here, copies too, is whole and of the version that is served."""
        return self.filled or not self._staging

    def finish(self, hooks: Hooks) -> None:
        """Make the engine's tensors of those that were written as copies. Raises what a hook raises."""
        self.filled = True
        for number, (_nbytes, kind) in self._staging.items():
            name, data = self.names[number], self.now[number].bytes()
            if kind == "fallback":
                hooks.load(name.removeprefix("fallback:"), data)
            elif kind == "staging":
                hooks.finish(name, data)
            else:  # a tensor of ours with strides that nobody writes piece by piece
                self._spread(name, data)

    def _spread(self, name: str, data: Any) -> None:
        tensor = self._tables[name]
        item = itemsize_of(tensor.dtype)
        there = bits_view(self._real[name].bytes(), item, 0, tensor.shape, tensor.strides)
        there[...] = _near(bits_view(data, item, 0, tensor.shape, contiguous(tensor.shape, item)), there)

    def digests(self, spans: list[Span]) -> dict[int, int]:
        """Return the digest of what lies in each tensor of `now` or `next`, as far as an update writes it."""
        sums: dict[int, int] = {}
        b = self._boxes
        for row, number in enumerate(b["tensor"].tolist()):
            part = box_digest(
                spans[number].bytes(), int(b["offset"][row]), tuple(b["size"][row].tolist()),
                tuple(b["stride"][row].tolist()), int(b["item"][row]),
            )  # fmt: skip
            sums[number] = (sums.get(number, 0) + part) & MASK
        return sums


def _near(bits: Any, there: Any) -> Any:
    """Return bits in a form that `there` can be filled from: numpy and torch do not copy to each other."""
    if on_gpu(bits) == on_gpu(there):
        return bits
    if on_gpu(bits):
        return bits.cpu().numpy()
    import torch

    return torch.from_numpy(bits)
