"""A stand-in for a GPU whose tokens travel through the engine: memory is the host's, kernels are numpy and run at once.

What is real: the halves and views in Python, the meeting, the proxy's thread in C, the engine. The kernels
(nic_kernels.py) keep to the same lists and words as those in `gpu_nic/*.cu`, so what they and the proxy say to each
other is put to the test.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import moe_cases
import numpy as np
import rank_process
from nic_kernels import Slot
from nic_words import array

from fabric_moe.cuda import arguments
from fabric_moe.dtypes import flat
from fabric_moe.gpu_nic import generation, halves
from fabric_moe.gpu_nic.layout import NicLayout


class StandIn:
    """In place of `fabric_moe.cuda.driver.Device`."""

    number, arch, multiprocessors, shared_limit = 0, "sm_90", 2, 226 << 10

    def __init__(self) -> None:
        self.layout: NicLayout  # set when kernels are asked for
        self._held: dict[int, Any] = {}
        self.skip: set[str] = set()  #: kernels that are not run

    def load(self, image: bytes) -> bytes:
        return image

    def kernel(self, module: Any, name: str) -> Any:
        return Launched(self, name.removeprefix("moe_nic_"))

    def allocate(self, nbytes: int) -> int:
        memory = np.zeros(nbytes + 64, np.uint8)
        at = -(-memory.ctypes.data // 64) * 64
        self._held[at] = memory
        return at

    host_words = allocate

    def free(self, at: int) -> None:
        del self._held[at]

    free_host = free

    def get(self, at: int, nbytes: int) -> bytes:
        return bytes(array(at, np.uint8, (nbytes,)))

    def synchronize(self) -> None:
        pass

    @property
    def held(self) -> int:
        return len(self._held)


class Launched:
    """In place of a kernel: done when `launch` returns."""

    def __init__(self, device: StandIn, name: str) -> None:
        self.device, self.layout, self.name = device, device.layout, name

    def launch(self, grid: int, block: int, shared: int, stream: int, a: Any) -> None:
        work = Slot(self.layout, a.c)
        if self.name in self.device.skip or work.local.broken:
            return
        kind = self.name.removeprefix("combine_")
        if kind in ("bfloat16", "float16", "float32"):
            work.combine(a, kind)
        else:
            getattr(work, self.name)(a)


def _rows_of(gen: Any, x: Any, what: str, nbytes: int, tokens: int, kind: str | None = None) -> Any:
    return flat(x.detach(), what).contiguous()


def install(put: Callable[[Any, str, Any], None]) -> StandIn:
    """Have groups on "cuda:0" through the engine use a stand-in, with tensors in host memory. put: a setattr."""
    device = StandIn()

    def divided(config: Any) -> NicLayout:
        device.layout = NicLayout.of(config)
        return device.layout

    put(generation, "device", lambda number: device)
    put(generation, "nvrtc", SimpleNamespace(cubin=lambda macros, arch, text: b"image"))
    put(generation, "NicLayout", SimpleNamespace(of=divided))
    put(generation.NicGeneration, "place", "cpu")
    put(generation.NicGeneration, "stream", lambda self: 0)
    for module in (arguments, halves):
        put(module, "here", lambda gen, x, what: x.detach())
        put(module, "rows_of", _rows_of)
    for module in (moe_cases, rank_process):  # what is wrong is known when a kernel is over, which is at once
        put(module, "settle", lambda case, group: group.check())
    return device
