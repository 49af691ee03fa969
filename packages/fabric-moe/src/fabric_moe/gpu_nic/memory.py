"""The memory of one rank of a generation whose tokens on a GPU travel through the engine, and its registrations."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from typing import Any

import numpy as np

from fabric_core import BackendError, FabricError, MrDesc, MrHandle, QueueFull, TransferEngine, Unsupported
from fabric_moe.cuda.report import Words
from fabric_moe.gpu_nic.layout import LOCAL, NicLayout

__all__ = ["NicMemory", "must_be_ordered"]

log = logging.getLogger("fabric.moe")

_PATIENCE = 2.0  # seconds that a NIC has to let go of memory
_WRITES_ORDERING = 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
_OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER


def _up(n: int) -> int:
    return -(-n // 64) * 64


def must_be_ordered(engine: TransferEngine, device: Any) -> None:
    """Raise Unsupported where a kernel that runs may read stale bytes after a NIC has said that its write has come.

    `local` copies by kernels. Of NICs the driver says it: where writes need a flush, nothing here makes one.
    """
    if engine.backend == "local":
        return
    handle, ordering = ctypes.c_int(), ctypes.c_int()
    device.call("cuDeviceGet", ctypes.byref(handle), device.number)
    device.call("cuDeviceGetAttribute", ctypes.byref(ordering), _WRITES_ORDERING, handle)
    if ordering.value < _OWNER:
        raise Unsupported(
            f"cuda:{device.number}: a NIC's writes need a flush before a kernel that runs may read them (writes "
            f"ordering {ordering.value}, {_OWNER} is wanted): use a GPU of compute capability 9.0 or later, or tokens "
            "in host memory"
        )


class NicMemory:
    """GPU memory for rows and sums, host memory for counts, pinned words. Raises BackendError."""

    def __init__(self, engine: TransferEngine, device: Any, where: str, layout: NicLayout) -> None:
        """device: allocates; where: what the engine is told about such memory, "cuda:0"."""
        self._device = device
        self._where = where
        self._layout = layout
        depth, total = layout.config.depth, layout.memory()["total"]
        self.incoming = self.outgoing = self.local = self.pinned = 0
        self.handles: list[MrHandle] = []
        self.descs: list[MrDesc] = []
        try:
            self.incoming = device.allocate(depth * layout.in_stride)
            self.outgoing = device.allocate(depth * layout.out_stride)
            self.local = device.allocate(LOCAL + depth * layout.scratch_stride)
            self.pinned = device.host_words(_up(ctypes.sizeof(Words)) + layout.pinned_bytes)
            self.control_in = engine.empty(layout.control_bytes)
            self.control_out = engine.empty(layout.control_bytes)
            for memory, write in (
                (self.control_out, False), ((self.outgoing, depth * layout.out_stride, where), False),
                (self.control_in, True), ((self.incoming, depth * layout.in_stride, where), True),
            ):  # fmt: skip
                handle, desc = engine.reg_mr(memory, write=write)
                self.handles.append(handle)
                self.descs.append(desc)
        except (BackendError, OverflowError) as error:
            self.release()
            raise BackendError(
                f"{error}; this rank wants {total} bytes of {where}: lower max_tokens, shared_rows, private_max or "
                "depth"
            ) from error
        except BaseException:
            self.release()
            raise

    @property
    def words(self) -> int:
        """Address of what kernels say to the host: `report.Words`."""
        return self.pinned

    @property
    def mail(self) -> int:
        """Address of the words between kernels and proxy; the counts of all slots lie behind them."""
        return self.pinned + _up(ctypes.sizeof(Words))

    def scratch(self, slot: int) -> int:
        """Return the address of the lists that the kernels of a slot make."""
        return self.local + LOCAL + slot * self._layout.scratch_stride

    def address(self, memory: Any) -> int:
        """Return where host memory of the engine lies."""
        return int(np.frombuffer(memory, np.uint8).ctypes.data)

    def release(self) -> None:
        """Take it back from the NICs, and free it; what a NIC does not let go is kept for good. Idempotent."""
        held = False
        for handle in self.handles:
            try:
                handle.close(timeout=_PATIENCE)
            except QueueFull:
                held = True
            except FabricError as error:
                log.info("a registration: %s", error)  # the engine is closed: nothing uses the memory any more
        self.handles.clear()
        if held:
            log.warning("%s: a NIC does not let go of the memory of a group: it is kept", self._where)
        else:
            for at in filter(None, (self.incoming, self.outgoing, self.local)):
                with contextlib.suppress(BackendError):
                    self._device.free(at)
            if self.pinned:
                with contextlib.suppress(BackendError):
                    self._device.free_host(self.pinned)
        self.incoming = self.outgoing = self.local = self.pinned = 0
