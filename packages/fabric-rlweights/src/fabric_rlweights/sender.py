"""One trainer rank's part of an update: tasks through a pipeline, under a watermark of temporary memory.

What lies at the destination as it lies here is written straight out of the parameter, of the host's memory or a GPU's.
The rest is packed, cast or quantised into the arena, and written from there; while pieces are on the wire, the next
ones are made, and sources that have to come to the GPU first are fetched for those after them. Nothing is ever
gathered from other ranks: scales that several share are agreed upon first (magnitudes.py), while whatever does not
depend on them is under way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fabric_core import MrHandle, Transfer, TransferEngine
from fabric_rlweights.arena import Arena
from fabric_rlweights.digest import Sums
from fabric_rlweights.dtypes import itemsize_of
from fabric_rlweights.magnitudes import Magnitudes
from fabric_rlweights.making import Made, Maker
from fabric_rlweights.plan import BLOCK, CAST
from fabric_rlweights.quantise import fused_on, kernel_on
from fabric_rlweights.route import Route
from fabric_rlweights.sources import sources
from fabric_rlweights.stage import Mark, device_for, open_stage, reach
from fabric_rlweights.tasks import Task, fit, make_tasks
from fabric_rlweights.views import on_gpu
from fabric_rlweights.writes import Links, SentStats, Writes

__all__ = ["Links", "Sender", "SentStats"]


class Sender:
    """A trainer rank's route, its memory, and its arena."""

    def __init__(self, engine: TransferEngine, buffers: Sequence[Any], route: Route, *, watermark: int) -> None:
        """Register what the route reads. `buffers`: by the numbers in the trainer's table; contiguous memory.

        Raises BadRange, ConfigError: the route does not fit the memory, or a piece does not fit under the watermark.
        Unsupported: a buffer is on a GPU that the engine does not serve.
        """
        self.engine, self.route, self.tasks = engine, route, make_tasks(route)
        if any(task.op >= CAST for task in self.tasks):
            import torch  # noqa: F401  # takes seconds: now, and not within the first update
        self.magnitudes = Magnitudes(engine, route)
        self._memory = sources(self.tasks, buffers)
        self._handles = {index: engine.reg_mr(part, write=False)[0] for index, part in self._memory.items()}
        device = self._device(engine)
        largest = max((task.temporary for task in self.tasks), default=0)
        self.arena = Arena(max(watermark, 64))
        self.arena.must_hold(largest)  # an error that names the numbers comes now, not in the first update
        self.stage = open_stage(engine, device, self.arena.limit if largest else 0)
        self._room: MrHandle | None = engine.reg_mr(self.stage.registered, write=False)[0] if largest else None
        self._maker = Maker(route, self._memory, self.stage, self.magnitudes)
        self._making: deque[tuple[Mark, int, int, Task, Made | None]] = deque()
        self.wake = threading.Event()

    def _device(self, engine: TransferEngine) -> str:
        """Return where pieces are made, and have the tasks know what they need there."""
        gpu = any(on_gpu(part) for part in self._memory.values())
        if not gpu and not any(task.copied for task in self.tasks):
            return "cpu"  # nothing is made
        device = device_for(engine, list(self._memory.values()))
        if device != "cpu":
            host = {index for index, part in self._memory.items() if not on_gpu(part)}
            fit(self.tasks, fetched=host, fused=fused_on(device))
            if any(task.op == BLOCK for task in self.tasks):
                kernel_on(device)  # compiled now, and not within the first update
        return device

    def close(self) -> None:
        """Deregister. Waits for transfers under way, and for a GPU that still makes pieces."""
        self.stage.settle()
        for handle in self._handles.values():
            handle.close()
        if self._room is not None:
            self._room.close()
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

        On a GPU, what the calling thread's current stream was given before is done first. `check` is called between
        tasks and may raise to break it off. `progress(done, all)` counts bytes.

        Raises TransferError and its kin: what is under way has ended then (C7), so no byte lands later.
        """
        stats, begin = SentStats(), time.monotonic()
        self._deadline, self._check, self._stats = deadline, check, stats
        self._writes = Writes(self.engine, self.arena, links, deadline, check, stats)
        self._sums = Sums() if digests else None
        self.arena.peak = 0
        total, told = sum(task.written for task in self.tasks), 0
        try:
            self._reached(self.stage.begin())
            while self._making:  # of an update that was broken off
                self._write_next()
            alone = [task for task in self.tasks if not self._maker.needs_others(task)]
            together = [task for task in self.tasks if self._maker.needs_others(task)]
            if self.route.into.size or together:
                self._agree(links)
            for number, task in enumerate(alone + together):
                if number == len(alone):
                    started = time.monotonic()
                    self.magnitudes.wait(links.addrs, deadline, self.wake, check)
                    stats.exchange += time.monotonic() - started
                check()
                self._one(task)
                told = stats.bytes
                if progress is not None:
                    progress(told, total)
            while self._making:
                self._write_next()
            self._writes.drain()
            if progress is not None and told < stats.bytes:
                progress(stats.bytes, total)
            with self.stage.working():
                stats.digests = self._sums.result() if self._sums is not None else {}
        except BaseException:
            self._stop()
            raise
        finally:
            self.magnitudes.end()
        stats.seconds, stats.peak = time.monotonic() - begin, self.arena.peak
        return stats

    def _agree(self, links: Links) -> None:
        """Send the neighbours the magnitudes of what is shared."""
        started, found = time.monotonic(), []
        for task in self.tasks:
            if self._maker.needs_others(task):
                self._check()
                at = self._take(task.fetched) if task.fetched else 0
                with self._coming_back(task, at, task.fetched):
                    found.append((task, self._maker.magnitudes_of(task, at)))
                if task.fetched:
                    self._stats.fetched += task.fetched
                    self._making.append((self.stage.mark(), at, task.fetched, task, None))
        self._maker.offer(found)
        while self._making:
            self._write_next()
        posted: list[Transfer] = []
        try:
            self.magnitudes.send(links.trainers, self._writes.left, posted)
        finally:
            self._writes.remember(posted)
        self._stats.prepare += time.monotonic() - started

    def _one(self, task: Task) -> None:
        if not task.copied:
            handle = self._handles[task.buffer]
            transfers: list[Transfer] = []
            try:
                for t in task.targets:
                    transfers.append(self._writes.post(handle, task.runs, t.places, t.run, t, t.tensor))
                    self._add(t.receiver, t.tensor, self._memory[task.buffer], task.runs, t.places, t.run, task.target)
            finally:  # those before one that cannot be posted are ended too
                self._writes.remember(transfers)
            self._stats.straight += task.written
            self._stats.bytes += task.written
        else:
            at = self._take(task.temporary)
            started = time.monotonic()
            with self._coming_back(task, at, task.temporary):
                made, room = self._maker.make(task, at), self.stage.room
                self._stats.fetched += task.fetched
                for t, places, scale_places in made.lies(task):
                    self._add(t.receiver, t.tensor, room, places, t.places, t.run, task.target)
                    if t.scales >= 0:
                        self._add(t.receiver, t.scales, room, scale_places, t.scale_places, t.scale_run, "float32")
            self._making.append((self.stage.mark(), at, task.temporary, task, made))
            self._stats.prepare += time.monotonic() - started
        while self._making and self._making[0][0].query():
            self._write_next()

    # ---- pieces

    @contextlib.contextmanager
    def _coming_back(self, task: Task, at: int, nbytes: int) -> Iterator[None]:
        """Have a range of the arena come back, when a GPU is through with it, though its piece could not be made."""
        try:
            yield
        except BaseException:
            if nbytes:
                self._making.append((self.stage.mark(), at, nbytes, task, None))
            raise

    def _take(self, nbytes: int) -> int:
        """Return a range of the arena: as soon as there is one, for which others are written first."""
        while (at := self.arena.take(nbytes)) is None:
            if self._making:
                self._write_next()
            else:
                self._writes.oldest()
        return at

    def _write_next(self) -> None:
        """Wait for the oldest piece that is being made, and write it."""
        mark, at, nbytes, task, made = self._making[0]
        self._reached(mark)
        self._making.popleft()
        if made is None:  # only its magnitudes were wanted, or it is not wanted any more
            self.arena.give(at, nbytes)
            return
        started = time.monotonic()
        assert self._room is not None
        transfers: list[Transfer] = []
        try:
            for t, places, scale_places in made.lies(task):
                transfers.append(self._writes.post(self._room, places, t.places, t.run, t, t.tensor))
                if t.scales >= 0:
                    post = self._writes.post(self._room, scale_places, t.scale_places, t.scale_run, t, t.scales)
                    transfers.append(post)
                    self._stats.bytes += made.scale_bytes
        finally:
            self._writes.remember(transfers, at, nbytes)
        self._stats.bytes += task.written
        self._stats.prepare += time.monotonic() - started

    def _reached(self, mark: Mark) -> None:
        started = time.monotonic()
        reach(mark, self.stage.device, self._deadline, self._check)
        self._stats.waiting += time.monotonic() - started

    def _add(self, receiver: int, tensor: int, memory: Any, mine: Any, theirs: Any, run: int, dtype: str) -> None:
        if self._sums is not None:
            with self.stage.working():
                self._sums.add(receiver, tensor, memory, mine, theirs, run, itemsize_of(dtype))

    def _stop(self) -> None:
        """End everything that is under way: afterwards no NIC reads or writes for this update.

        A GPU cannot be told to stop: what it still makes is waited for, and thrown away, when the next update begins.
        """
        self._writes.stop()
        self._making = deque((mark, at, nbytes, task, None) for mark, at, nbytes, task, _made in self._making)
