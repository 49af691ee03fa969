"""Why a submit was refused: the C engine gives a number, this says it in words, with the values (C6).

Off the hot path: runs only after a refusal, and looks at the same bounds again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fabric_core.errors import (
    BackendError,
    BadRange,
    ConfigError,
    FabricError,
    RemoteAccessError,
    StaleHandle,
)

if TYPE_CHECKING:
    from fabric_core.base import EngineBase
    from fabric_core.types import MrDesc, MrHandle, Pages, ScatterDst

__all__ = ["many", "paged", "send", "write"]

_IMM_END = 1 << 29


def _common(
    engine: EngineBase, code: int, imm: int | None, handle: MrHandle | None, desc: MrDesc | None, nic: int | None
) -> FabricError | None:
    """What all verbs share: handles, rights, NIC, immediate."""
    if code == -errno.EBADF:
        what = repr(handle)
        if handle is not None and handle._engine is not engine:
            return StaleHandle(f"{what} belongs to another engine: register the memory with this one")
        return StaleHandle(f"{what} is closed: register the memory again")
    if code == -errno.ESTALE:
        return StaleHandle(f"{desc!r} is not known to this engine any more")
    if code == -errno.EACCES:
        return RemoteAccessError(
            f"{desc!r} may not be written to",
            code="EACCES",
            cure="its owner registered it with write=False; register it with write=True",
        )
    if code == -errno.EXDEV:
        return ConfigError("the source and the targets belong to different devices of this engine")
    if code == -errno.ENODEV:
        return ConfigError(f"nic={nic!r}: this engine has NICs 0 to {engine.nics - 1}")
    if code == -errno.EINVAL and imm is not None and not (isinstance(imm, int) and 0 <= imm < _IMM_END):
        return BadRange(f"imm={imm!r}: an immediate comes from the receiver's alloc_imm() (0 to 2**29 - 1), or is None")
    if code == -errno.ENOMEM:
        return BackendError("not enough memory for the request's lists")
    return None


def _outside(what: str, nbytes: int, offset: int, length: int) -> str | None:
    if offset + length <= nbytes:
        return None
    return f"{length} bytes at offset {offset} end at {offset + length}, but {what} has {nbytes} bytes"


def _unknown(engine: EngineBase, code: int, verb: str) -> FabricError:
    return BackendError(f"{verb} on {engine!r} was refused: {os.strerror(-code)}")


def write(
    engine: EngineBase,
    code: int,
    length: int,
    imm: int | None,
    handle: MrHandle,
    loff: int,
    desc: MrDesc,
    roff: int,
    nic: int | None,
) -> FabricError:
    """Explain a refused single write."""
    if code == -errno.ERANGE:
        wrong = _outside(f"the source, {handle!r},", handle.nbytes, loff, length) or _outside(
            f"the target, {desc!r},", desc.nbytes, roff, length
        )
        return BadRange(wrong or f"write of {length} bytes from offset {loff} to offset {roff} is out of range")
    return _common(engine, code, imm, handle, desc, nic) or _unknown(engine, code, "a write")


def _pages_outside(what: str, nbytes: int, pages: Pages, page_len: int) -> str | None:
    flat = memoryview(pages.indices).cast("B").cast("I")
    for k, index in enumerate(flat):
        at = pages.offset + index * pages.stride
        if at + page_len > nbytes:
            return (
                f"page {k} (index {index}) of {what}: {page_len} bytes at offset {at} end at {at + page_len}, "
                f"but it has {nbytes} bytes (stride {pages.stride}, offset {pages.offset})"
            )
    return None


def paged(
    engine: EngineBase,
    code: int,
    page_len: int,
    imm: int | None,
    handle: MrHandle,
    src: Pages,
    desc: MrDesc,
    dst: Pages,
    nic: int | None,
) -> FabricError:
    """Explain a refused paged write."""
    if code == -errno.ERANGE:
        wrong = _pages_outside(f"the source, {handle!r}", handle.nbytes, src, page_len) or _pages_outside(
            f"the target, {desc!r}", desc.nbytes, dst, page_len
        )
        return BadRange(wrong or f"pages of {page_len} bytes are out of range: {src!r} to {dst!r}")
    known = _common(engine, code, imm, handle, desc, nic)
    if known is not None:
        return known
    if code == -errno.EINVAL:
        if len(src) != len(dst):
            return BadRange(f"the source lists {len(src)} pages and the target {len(dst)}: they go in pairs")
        if len(src) == 0:
            return BadRange("no pages: a paged write has at least one")
    return _unknown(engine, code, "a paged write")


def many(
    engine: EngineBase, code: int, imm: int | None, src: MrHandle | None, dst: Sequence[ScatterDst], nic: int | None
) -> FabricError:
    """Explain a refused scatter or barrier."""
    if code == -errno.ERANGE:
        for k, t in enumerate(dst):
            wrong = _outside(f"the target, {t.desc!r},", t.desc.nbytes, t.dst_offset, t.length)
            if wrong is None and src is not None:
                wrong = _outside(f"the source, {src!r},", src.nbytes, t.src_offset, t.length)
            if wrong:
                return BadRange(f"target {k}: {wrong}")
    readonly = next((t.desc for t in dst if not t.desc.writable), dst[0].desc)
    return _common(engine, code, imm, src, readonly, nic) or _unknown(engine, code, "a scatter or barrier")


def send(engine: EngineBase, code: int, msg: Any) -> FabricError:
    """Explain a refused message."""
    if code == -errno.ERANGE:
        nbytes = memoryview(msg).nbytes
        return BadRange(
            f"a message of {nbytes} bytes is too long: backend {engine.backend!r} takes {engine.max_message} bytes; "
            "write() longer data into registered memory"
        )
    return _common(engine, code, None, None, None, None) or _unknown(engine, code, "a send")
