"""What a step of a prepared sequence writes, and its form in C."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fabric_core.errors import BadRange
from fabric_core.native_lib import ffi
from fabric_core.types import MrDesc, MrHandle, Pages

__all__ = ["StepWrite", "draft"]

_NEVER = 1 << 60  # nanoseconds


@dataclass(frozen=True, slots=True)
class StepWrite:
    """One write, or pages, of a step of a sequence: the arguments of the engine's submits."""

    length: int  #: bytes; of one page
    imm: int | None
    src: tuple[MrHandle, int | Pages]
    dst: tuple[MrDesc, int | Pages]
    nic: int | None = None
    timeout: float | None = None  #: seconds from its submit; None: the engine's
    deadline: float | None = None  #: instead: a time of time.monotonic()
    lane: int = 0  #: lanes (0 to 65535) are cancelled, and fail, each by itself: one for each peer, say


def draft(engine: Any, step: int, w: StepWrite, held: dict[tuple[int, int], object]) -> tuple[Any, ...]:
    """Return a fab_draft of C, field by field."""
    (handle, s), (desc, d) = w.src, w.dst
    remote = engine._target(handle, desc)
    held[id(handle), id(desc)] = handle, desc, remote
    if (w.imm is not None and w.imm < 0) or (w.nic is not None and w.nic < 0):  # C takes a negative number for "none"
        raise BadRange(f"imm={w.imm!r}, nic={w.nic!r}: None, or 0 and more")
    if not 0 <= w.lane < 1 << 16:
        raise BadRange(f"lane={w.lane!r}: 0 to 65535")
    timeout = 0 if w.timeout is None else max(1, min(_NEVER, int(w.timeout * 1e9)))
    until = 0 if w.deadline is None else _NEVER if math.isinf(w.deadline) else max(1, int(w.deadline * 1e9))
    last = timeout, until, 0, -1 if w.imm is None else w.imm, -1 if w.nic is None else w.nic
    if isinstance(s, Pages) and isinstance(d, Pages):
        si, di = ffi.from_buffer("uint32_t[]", s.indices), ffi.from_buffer("uint32_t[]", d.indices)
        if len(si) != len(di) or not len(si):
            raise BadRange(f"{len(si)} source pages, {len(di)} target pages")
        return (handle._handle, s.offset, s.stride, remote.handle, d.offset, d.stride, w.length, *last, len(si), si, di,
                step, w.lane)  # fmt: skip
    return (handle._handle, s, 0, remote.handle, d, 0, w.length, *last, 0, ffi.NULL, ffi.NULL, step, w.lane)
