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

from fabric_core import BadRange, MrDesc, MrHandle, NetAddr, Pages, Transfer, TransferEngine, WaitTimeout
from fabric_rlweights.arena import Arena, aligned
from fabric_rlweights.digest import MASK, run_digest
from fabric_rlweights.dtypes import itemsize_of
from fabric_rlweights.magnitudes import Magnitudes
from fabric_rlweights.making import Bytes, Maker
from fabric_rlweights.plan import CAST
from fabric_rlweights.route import Route
from fabric_rlweights.tasks import Target, Task, make_tasks

__all__ = ["Links", "Sender", "SentStats"]

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
        if any(task.op >= CAST for task in self.tasks):
            import torch  # noqa: F401  # takes seconds: now, and not within the first update
        self.magnitudes = Magnitudes(engine, route)
        used = sorted({task.buffer for task in self.tasks})
        if used and not 0 <= used[0] <= used[-1] < len(buffers):
            raise BadRange(f"the route reads buffer {used[-1]}, this rank has {len(buffers)}")
        self._memory = {index: _bytes_of(buffers[index]) for index in used}
        for task in self.tasks:  # what is packed is read by numpy, which would not notice
            low, end = task.span
            if low < 0 or end > len(self._memory[task.buffer]):
                raise BadRange(
                    f"the trainer's table puts a box of {task.size} {task.source} into bytes {low}..{end} of buffer "
                    f"{task.buffer}, which has {len(self._memory[task.buffer])}: give the buffers that it was made of"
                )
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
            self._room_bytes = np.zeros(0, np.uint8)
        self._maker = Maker(route, self._memory, self._room_bytes, self.magnitudes)
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
            alone = [task for task in self.tasks if not self._maker.needs_others(task)]
            together = [task for task in self.tasks if self._maker.needs_others(task)]
            if self.route.into.size or together:
                self._agree(stats)
            for number, task in enumerate(alone + together):
                if number == len(alone):
                    started = time.monotonic()
                    self.magnitudes.wait(links.addrs, deadline, self.wake, check)
                    stats.exchange += time.monotonic() - started
                check()
                self._one(task, stats)
                if progress is not None:
                    progress(stats.bytes, total)
            self._drain(stats)
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
            if self._maker.needs_others(task):
                self._check()
                self._maker.offer_magnitudes(task)
        self.magnitudes.send(self._links.trainers, self._left())
        stats.prepare += time.monotonic() - started

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
            own = self._maker.make(task, at, scale_at)
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
            self._wait(transfer)
        self._under_way.popleft()
        if nbytes:
            self.arena.give(at, nbytes)
        stats.waiting += time.monotonic() - started

    def _drain(self, stats: SentStats) -> None:
        """Wait for all, the newest first: when that has ended, most others have, and this thread is woken once.

        On few cores each of its wake-ups takes a core from the copying.
        """
        started = time.monotonic()
        for transfers, _at, _nbytes in reversed(self._under_way):
            for transfer in reversed(transfers):
                self._wait(transfer)
        while self._under_way:
            _transfers, at, nbytes = self._under_way.popleft()
            if nbytes:
                self.arena.give(at, nbytes)
        stats.waiting += time.monotonic() - started

    def _wait(self, transfer: Transfer) -> None:
        """Wait for its end, asking `check` now and then.

        Only `wait` is called, never `done`: that counts as polling, and on few cores the engine's worker leaves the
        work to whoever polls (decision 0002), which this thread does not do while it sleeps.
        """
        while True:
            self._check()
            try:
                transfer.wait(min(0.2, self._left()))
                return
            except WaitTimeout:
                continue

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
