"""What this machine can do at best, measured in the same run as the figure that stands beside it.

    stream   one core copies memory to memory, past the caches where that is faster: the roof of a mapped path
    cma      the kernel copies between address spaces with process_vm_writev: the roof for memory of the user's own
    link     the GPU's copy engine moves one large piece: the roof between a GPU and the host, or inside a GPU

The first two walk as much memory as the benchmark does, in pieces of the size in question, in C (`native/limits.c`).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

__all__ = ["Limit", "cma", "link", "stream"]


@dataclass(frozen=True, slots=True)
class Limit:
    """A measured roof."""

    name: str  #: "stream" or "cma"
    bytes_per_s: float | None  #: None: not measured, see `how`
    how: str  #: what was measured, or why there is none


def stream(nbytes: int, span: int, seconds: float = 0.1) -> Limit:
    """Copy pieces of `nbytes`, over `span` bytes, with plain and with streaming stores; the faster is the roof."""
    from fabric_core.native_lib import lib

    found = float(lib.fab_limit_stream(nbytes, span, seconds))
    return Limit("stream", found, "native") if found > 0 else Limit("stream", None, "no memory to measure with")


def cma(nbytes: int, span: int, seconds: float = 0.1) -> Limit:
    """The same through the kernel, into this very process: needs no permission, costs what a peer costs."""
    from fabric_core.native_lib import lib

    found = float(lib.fab_limit_cma(nbytes, span, seconds))
    return Limit("cma", found, "native") if found > 0 else Limit("cma", None, "process_vm_writev is refused")


def link(here: str, there: str, gpu: int = 0, nbytes: int = 64 << 20, times: int = 5) -> Limit:
    """Copy from memory of one kind to memory of the other ("gpu", or host memory), in one piece; the fastest counts."""
    from fabric_core.native_lib import ffi, lib

    out = ffi.new("uint64_t[2]")
    with ExitStack() as stack:
        for i, kind in enumerate((here, there)):
            make, free = (
                (lib.fab_cuda_alloc, lib.fab_cuda_free)
                if kind == "gpu"
                else (lib.fab_cuda_pinned, lib.fab_cuda_unpinned)
            )
            if make(gpu, nbytes, out + i) < 0:
                return Limit("link", None, "no memory to measure with")
            stack.callback(free, gpu, out[i])
        best = 0.0
        for _ in range(times):
            begin = time.perf_counter()
            lib.fab_cuda_copy(gpu, out[1], out[0], nbytes)
            best = max(best, nbytes / (time.perf_counter() - begin))
        return Limit("link", best, f"one copy of {nbytes >> 20} MiB")
