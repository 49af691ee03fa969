"""One trainer rank's part of an update: tasks through a pipeline, under a watermark of temporary memory.

What lies at the destination as it lies here is written straight out of the parameter. The rest is packed, cast or
quantised into the arena, and written from there; while one piece is on the wire, the next ones are made. Nothing is
ever gathered from other ranks: scales that several share are agreed upon first (magnitudes.py), while whatever does not
depend on them is under way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric_core import BadRange, MrDesc, MrHandle, NetAddr, Pages, Transfer, TransferEngine
from fabric_rlweights.arena import Arena, aligned
from fabric_rlweights.digest import MASK, run_digest
from fabric_rlweights.dtypes import bits_of, itemsize_of, torch_dtype
from fabric_rlweights.magnitudes import Magnitudes
from fabric_rlweights.plan import BLOCK, CAST, PER_TENSOR
from fabric_rlweights.quantise import Floats, magnitudes, quantise, scales
from fabric_rlweights.route import Route
from fabric_rlweights.tasks import Target, Task, make_tasks

__all__ = ["Links", "Sender", "SentStats"]

Bytes = NDArray[np.uint8]
WINDOW = 1024  #: transfers of one rank under way: more do not make a NIC faster


@dataclass
class Links:
    """Where an update goes: given by the controller for each of them."""

    tensors: dict[int, dict[int, MrDesc]]  #: inference rank -> its tensors
    imms: dict[int, int]  #: inference rank -> immediate
    trainers: dict[int, tuple[MrDesc, int]]  #: trainer rank -> where magnitudes go
    addrs: dict[int, NetAddr]  #: trainer rank -> its engine


@dataclass
class SentStats:
    """What an update took on this rank. Seconds and bytes."""

    seconds: float = 0.0
    prepare: float = 0.0  #: packing, casting, quantising, and what of the transfer runs in that thread meanwhile
    exchange: float = 0.0  #: waiting for the neighbours' magnitudes
    waiting: float = 0.0  #: for room under the watermark, or for the last transfers
    bytes: int = 0
    straight: int = 0  #: of them, written without a copy
    writes: int = 0
    peak: int = 0  #: temporary memory
    digests: dict[int, dict[int, int]] = field(default_factory=dict)  #: inference rank -> tensor -> sum


class Sender:
    """A trainer rank's route, its memory, and its arena."""

    def __init__(self, engine: TransferEngine, buffers: Sequence[Any], route: Route, *, watermark: int) -> None:
        """Register what the route reads. `buffers`: by the numbers in the trainer's table; contiguous CPU memory.

        Raises BadRange, ConfigError: the route does not fit the memory, or a piece does not fit under the watermark.
        """
        self.engine = engine
        self.route = route
        self.tasks = make_tasks(route)
        self.magnitudes = Magnitudes(engine, route)
        self._shared = {int(row) for row in self.magnitudes.shared}
        used = sorted({task.buffer for task in self.tasks})
        if used and used[-1] >= len(buffers):
            raise BadRange(f"the route reads buffer {used[-1]}, this rank has {len(buffers)}")
        self._memory = {index: _bytes_of(buffers[index]) for index in used}
        self._handles = {index: engine.reg_mr(self._memory[index], write=False)[0] for index in used}
        largest = max([0, *(task.temporary for task in self.tasks)])
        self.arena = Arena(max(watermark, 64))
        if largest:
            block = self.arena.take(largest)  # an error that names the numbers comes now, not in the first update
            assert block is not None
            self.arena.give(block, largest)
            self.arena.peak = 0
            self._room = engine.empty(self.arena.limit)
            self._room_handle: MrHandle | None = engine.reg_mr(self._room, write=False)[0]
            self._room_bytes: Bytes = np.frombuffer(self._room, np.uint8)
        else:
            self._room_handle = None
        self._under_way: deque[tuple[list[Transfer], int, int]] = deque()
        self.wake = threading.Event()

    def close(self) -> None:
        """Deregister. Waits for transfers under way."""
        for handle in self._handles.values():
            handle.close()
        if self._room_handle is not None:
            self._room_handle.close()
        self.magnitudes.close()

    # ---- an update

    def run(
        self,
        links: Links,
        deadline: float,
        *,
        check: Callable[[], None] = lambda: None,
        digests: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> SentStats:
        """Send everything; returns when every write has ended well.

        `check` is called between tasks and may raise to break it off. `progress(done, all)` counts bytes.

        Raises TransferError and its kin: what is under way has ended then (C7), so no byte lands later.
        """
        stats, begin = SentStats(), time.monotonic()
        self._links, self._deadline, self._check, self._stats = links, deadline, check, stats
        self._digests = digests
        self.arena.peak = 0
        total = sum(task.written for task in self.tasks)
        try:
            if self.route.into.size or self._shared:
                self._agree(stats)
            alone = [task for task in self.tasks if task.row not in self._shared]
            together = [task for task in self.tasks if task.row in self._shared]
            for number, task in enumerate(alone + together):
                if number == len(alone):
                    started = time.monotonic()
                    self.magnitudes.wait(links.addrs, deadline, self.wake, check)
                    stats.exchange += time.monotonic() - started
                check()
                self._one(task, stats)
                if progress is not None:
                    progress(stats.bytes, total)
            while self._under_way:
                self._oldest(stats)
        except BaseException:
            self._stop()
            raise
        finally:
            self.magnitudes.end()
        stats.seconds, stats.peak = time.monotonic() - begin, self.arena.peak
        return stats

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _agree(self, stats: SentStats) -> None:
        """Send the neighbours the magnitudes of what is shared."""
        started = time.monotonic()
        for task in self.tasks:
            if task.row in self._shared:
                self._check()
                found = magnitudes(self._blocks_of(task), *task.first, task.block)
                for row in self._rows(task):
                    self.magnitudes.put(row, found)
        self.magnitudes.send(self._links.trainers, self._left())
        stats.prepare += time.monotonic() - started

    def _rows(self, task: Task) -> list[int]:
        """The route's rows that a task serves, as far as they share scales."""
        same = (self.route.buffer == task.buffer) & (self.route.offset == task.offset) & (self.route.op == task.op)
        same &= (self.route.size == task.size).all(axis=1)
        return [int(row) for row in np.flatnonzero(same) if int(row) in self._shared]

    def _one(self, task: Task, stats: SentStats) -> None:
        if not task.copied:
            handle, memory = self._handles[task.buffer], self._memory[task.buffer]
            sources = [task.runs] * len(task.targets)
            transfers = [self._write(handle, task.runs, target.places, target.run, target) for target in task.targets]
            self._remember(transfers, 0, 0, stats)
            stats.straight += task.written
        else:
            assert self._room_handle is not None
            while (at := self.arena.take(task.temporary)) is None:
                self._oldest(stats)
            started = time.monotonic()
            memory = self._room_bytes
            scale_at = at + aligned(task.nbytes)
            own = self._make(task, at, scale_at)
            transfers, sources = [], []
            for target in task.targets:
                sources.append(at + np.arange(len(target.places), dtype=np.int64) * target.run)
                transfers.append(self._write(self._room_handle, sources[-1], target.places, target.run, target))
                if target.scales >= 0:
                    transfers.append(self._write_scales(scale_at, own, target, stats))
            stats.prepare += time.monotonic() - started
            self._remember(transfers, at, task.temporary, stats)
        if self._digests:
            for target, places in zip(task.targets, sources, strict=True):
                self._add(target, target.tensor, memory, places, target.places, target.run, itemsize_of(task.target))
        stats.bytes += task.written
        stats.writes += sum(len(target.places) + len(target.scale_places) for target in task.targets)

    # ---- making a piece ready

    def _source(self, task: Task) -> NDArray[Any]:
        item = itemsize_of(task.source)
        bits = self._memory[task.buffer][task.offset :]
        bits = bits[: len(bits) // item * item].view(bits_of(item))
        return np.lib.stride_tricks.as_strided(bits, task.size, task.stride, writeable=False)

    def _tensor(self, task: Task) -> Any:
        import torch

        view = self._source(task)
        item = view.itemsize
        flat = torch.frombuffer(self._memory[task.buffer], dtype=torch_dtype(task.source), offset=task.offset)
        return flat.as_strided(task.size, [step // item for step in task.stride])

    def _blocks_of(self, task: Task) -> Any:
        x = self._tensor(task)
        return x.reshape((1,) * (3 - x.ndim) + tuple(x.shape)) if x.ndim < 3 else x.reshape(x.shape[-3:])

    def _make(self, task: Task, at: int, scale_at: int) -> Bytes | None:
        """Put the result into the arena at `at`; returns its scales, if any, which lie at `scale_at`."""
        out = self._room_bytes[at : at + task.nbytes]
        shape = tuple(task.size[axis] for axis in task.order)
        if task.op < CAST:
            source = self._source(task)
            np.copyto(out.view(source.dtype).reshape(shape), source.transpose(task.order))
            return None
        import torch

        result = torch.frombuffer(out, dtype=torch_dtype(task.target))
        if task.op == CAST:
            result.view(shape).copy_(self._tensor(task).permute(task.order))
            return None
        x = self._blocks_of(task)
        if task.row in self._shared:
            touched = self.route.touch_size[task.row]
            shape3 = (1, 1, 1) if task.op == PER_TENSOR else (int(np.prod(touched[:-2])), *touched[-2:].tolist())
            largest = self.magnitudes.largest(task.row, shape3)
        else:
            largest = magnitudes(x, *task.first, task.block)
        begin = scale_at + aligned(task.scale_bytes)
        work = torch.frombuffer(self._room_bytes[begin : begin + task.work], dtype=torch.float32)
        quantise(x, largest, result.view(tuple(x.shape)), work, *task.first, task.block)
        return self._scales(task, largest, scale_at)

    def _scales(self, task: Task, largest: Floats, scale_at: int) -> Bytes:
        """Put the scales of the blocks that this piece owns into the arena, in the destination's order."""
        row = task.row
        found = scales(largest).reshape(self.route.touch_size[row])
        if task.op == BLOCK:
            low = self.route.own_start[row] - self.route.touch_start[row]
            box = zip(low, low + self.route.own_size[row], strict=True)
            found = found[tuple(slice(max(int(a), 0), max(int(b), 0)) for a, b in box)]
        step = self.route.scale_step[row]
        order = sorted(range(found.ndim), key=lambda axis: -int(step[axis]) if found.shape[axis] > 1 else 0)
        flat = np.ascontiguousarray(found.transpose(order)).view(np.uint8).reshape(-1)
        self._room_bytes[scale_at : scale_at + len(flat)] = flat
        return self._room_bytes[scale_at : scale_at + len(flat)]

    # ---- writing

    def _write(self, handle: MrHandle, mine: Any, theirs: Any, run: int, target: Target, tensor: int = -1) -> Transfer:
        desc = self._links.tensors[target.receiver][target.tensor if tensor < 0 else tensor]
        imm, left = self._links.imms[target.receiver], self._left()
        if len(theirs) == 1:
            place = (handle, int(mine[0])), (desc, int(theirs[0]))
            return self.engine.submit_single_write(run, imm, *place, timeout=left)
        source, target_pages = _pages(mine), _pages(theirs)
        return self.engine.submit_paged_writes(run, imm, (handle, source), (desc, target_pages), timeout=left)

    def _write_scales(self, at: int, own: Bytes | None, target: Target, stats: SentStats) -> Transfer:
        assert own is not None
        assert self._room_handle is not None
        places = at + np.arange(len(target.scale_places), dtype=np.int64) * target.scale_run
        if self._digests:
            where = target.scale_places
            self._add(target, target.scales, self._room_bytes, places, where, target.scale_run, 4)
        stats.bytes += len(own)
        return self._write(self._room_handle, places, target.scale_places, target.scale_run, target, target.scales)

    def _add(self, target: Target, tensor: int, memory: Bytes, mine: Any, theirs: Any, run: int, item: int) -> None:
        sums = self._stats.digests.setdefault(target.receiver, {})
        for here, there in zip(mine.tolist(), theirs.tolist(), strict=True):
            part = run_digest(memory[here : here + run].reshape(1, run), item, np.array([there // item], np.int64))
            sums[tensor] = (sums.get(tensor, 0) + part) & MASK

    def _remember(self, transfers: list[Transfer], at: int, nbytes: int, stats: SentStats) -> None:
        self._under_way.append((transfers, at, nbytes))
        while len(self._under_way) > WINDOW:
            self._oldest(stats)

    def _oldest(self, stats: SentStats) -> None:
        """Wait for the oldest task's writes, and give its memory back."""
        started = time.monotonic()
        transfers, at, nbytes = self._under_way[0]
        for transfer in transfers:
            while not transfer.done:
                self._check()
                try:
                    transfer.wait(min(0.2, self._left()))
                except TimeoutError:
                    if transfer.done:
                        raise
            transfer.wait(0)
        self._under_way.popleft()
        if nbytes:
            self.arena.give(at, nbytes)
        stats.waiting += time.monotonic() - started

    def _stop(self) -> None:
        """Cancel what is under way, and wait for its end: afterwards no NIC reads or writes for this update."""
        for transfers, _at, _nbytes in self._under_way:
            for transfer in transfers:
                transfer.cancel()
        for transfers, at, nbytes in self._under_way:
            for transfer in transfers:
                try:
                    transfer.wait(5.0)
                except Exception:  # how it ended does not matter any more, that it ended does
                    pass
            if nbytes:
                self.arena.give(at, nbytes)
        self._under_way.clear()


def _pages(places: Any) -> Pages:
    """Byte offsets as indices with one stride."""
    first = int(places[0])
    step = int(np.gcd.reduce(places - first)) or 1
    return Pages(((places - first) // step).astype(np.uint32), step, first)


def _bytes_of(buffer: Any) -> Bytes:
    """Return contiguous CPU memory as bytes, without a copy. Raises BadRange."""
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "untyped_storage"):
        import torch

        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise BadRange(
                f"a trainer's buffer is on {buffer.device}, contiguous: {buffer.is_contiguous()}; only contiguous CPU "
                "memory is served"
            )
        if buffer.numel() == 0:
            return np.zeros(0, np.uint8)
        flat: Bytes = buffer.detach().reshape(-1).view(torch.uint8).numpy()
        return flat
    flat = np.asarray(buffer)
    if not flat.flags.c_contiguous:
        raise BadRange(f"a trainer's buffer of shape {flat.shape} is not contiguous")
    return flat.reshape(-1).view(np.uint8)
