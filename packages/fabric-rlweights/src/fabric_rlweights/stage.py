"""Where pieces are made, and when they are ready: host memory at once, a GPU in the order of streams of its own.

A piece goes through the same steps on both: the source is fetched (when the parameters lie in host memory and the
engine serves a GPU), the piece is made, a mark is set, and when the mark is reached it is written. On a GPU the host
only hands out work: it waits for marks, which are events, never for a stream that others use.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from fabric_core import ConfigError, DeadlineExceeded, TransferEngine
from fabric_rlweights.dtypes import itemsize_of
from fabric_rlweights.fetching import bounce, copy_strip, strips
from fabric_rlweights.meta import contiguous
from fabric_rlweights.moves import pages
from fabric_rlweights.tasks import Task
from fabric_rlweights.views import Bytes, device_name, on_gpu, torch_view

__all__ = ["DONE", "CudaStage", "HostStage", "Mark", "Stage", "device_for", "open_stage", "reach"]


SPIN = 0.001  #: seconds that a mark is looked for before the thread begins to sleep in between
NAP = 0.00005


class Mark(Protocol):
    """A point in a stage's work."""

    def query(self) -> bool:
        """Whether everything before it is done."""


class _Done:
    def query(self) -> bool:
        return True


DONE: Mark = _Done()


class Stage(Protocol):
    """Temporary memory, and who works in it. `room` is bytes; `registered` is what an engine registers of it."""

    room: Any
    registered: Any
    device: str

    def begin(self) -> Mark:
        """Start an update; the mark: what this thread's stream had to do by now, the parameters above all, is done."""

    def working(self) -> contextlib.AbstractContextManager[object]:
        """Pieces are made inside this."""

    def fetch(self, memory: Bytes, task: Task, at: int) -> Any:
        """Copy a task's source to `at` in the room; returns it as a tensor that may be used inside `working`."""

    def mark(self) -> Mark:
        """Return the point that the work has got to when all that was handed out by now is done."""

    def settle(self) -> None:
        """Wait until nothing works in the room any more."""


class HostStage:
    """Memory of the host's, and this thread."""

    device = "cpu"

    def __init__(self, engine: TransferEngine, nbytes: int) -> None:
        """`nbytes`: of the room; 0: none is needed."""
        self.registered: Any = engine.empty(nbytes) if nbytes else np.zeros(0, np.uint8)
        self.room: Bytes = np.frombuffer(self.registered, np.uint8)

    def begin(self) -> Mark:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return DONE
        return torch.cuda.current_stream().record_event()  # type: ignore[no-any-return]  # copies of a GPU to here

    def working(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def fetch(self, memory: Bytes, task: Task, at: int) -> Any:
        raise NotImplementedError("host memory is read where it lies")

    def mark(self) -> Mark:
        return DONE

    def settle(self) -> None:
        return None


class CudaStage:
    """Memory of a GPU's, a stream that pieces are made in, and one that their sources come by."""

    def __init__(self, device: str, nbytes: int) -> None:
        """`nbytes`: of the room; 0: none is needed. Raises torch.OutOfMemoryError."""
        import torch

        self.device = device
        self.room = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.registered = self.room
        self._making, self._copying = torch.cuda.Stream(device), torch.cuda.Stream(device)
        for stream in (self._making, self._copying):  # whoever had this memory before may not be through with it
            stream.wait_stream(torch.cuda.current_stream(device))
        self._chunk = bounce()

    def begin(self) -> Mark:
        import torch

        mark = torch.cuda.current_stream(self.device).record_event()
        self._making.wait_event(mark)
        self._copying.wait_event(mark)
        return mark  # type: ignore[no-any-return]

    def working(self) -> contextlib.AbstractContextManager[object]:
        import torch

        return torch.cuda.stream(self._making)  # type: ignore[no-any-return]

    def fetch(self, memory: Bytes, task: Task, at: int) -> Any:
        import torch

        item = itemsize_of(task.source)
        packed = contiguous(task.size, item)
        run, (theirs, ours) = pages(task.size, item, task.stride, packed)
        with torch.cuda.stream(self._copying):
            for strip in strips(theirs + task.offset, ours + at):
                copy_strip(self.room, memory, strip, run, self._copying.cuda_stream, self._chunk)
        self._making.wait_stream(self._copying)
        return torch_view(self.room, task.source, at, task.size, packed)

    def mark(self) -> Mark:
        return self._making.record_event()  # type: ignore[no-any-return]

    def settle(self) -> None:
        self._copying.synchronize()
        self._making.synchronize()


def reach(mark: Mark, device: str, deadline: float, check: Callable[[], None]) -> None:
    """Wait for a mark. A GPU tells nobody, so it is looked at; `check` may raise to break it off.

    Raises DeadlineExceeded.
    """
    started = time.monotonic()
    while not mark.query():
        now = time.monotonic()
        check()
        if now > deadline:
            raise DeadlineExceeded(
                f"{device} had not done what it was given when the update's time was up: give push() more time, or the "
                "GPU less work before it",
                op="push",
                code="ETIME",
            )
        if now - started > SPIN:
            time.sleep(NAP)


def device_for(engine: TransferEngine, memory: list[Any]) -> str:
    """Return where a trainer with these buffers makes its pieces: on their GPU, else on the engine's, else "cpu".

    Raises ConfigError: the buffers lie on two GPUs.
    """
    found = sorted({device_name(part) for part in memory if on_gpu(part)})
    if len(found) > 1:
        raise ConfigError(
            f"a trainer's buffers lie on {' and '.join(found)}: have a trainer (and an engine) for each GPU"
        )
    if found:
        return found[0]
    served = next((name for name in engine.devices if name.startswith("cuda:")), None)
    return served if served is not None and _torch_has(served) else "cpu"


@functools.cache
def _torch_has(device: str) -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available()) and int(device.partition(":")[2]) < int(torch.cuda.device_count())


def open_stage(engine: TransferEngine, device: str, nbytes: int) -> Stage:
    """Return a stage on a device, with a room of `nbytes`."""
    return HostStage(engine, nbytes) if device == "cpu" else CudaStage(device, nbytes)
