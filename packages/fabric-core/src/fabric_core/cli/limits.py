"""What this machine can do at best, measured in the same run as the figure that stands beside it.

    stream   one core copies memory to memory, past the caches where that is faster: the roof of a mapped path
    cma      the kernel copies between address spaces with process_vm_writev: the roof for memory of the user's own

Both walk as much memory as the benchmark does, in pieces of the size in question, in C (`native/limits.c`).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limit", "cma", "stream"]


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
