"""Adapts a `Domain` written in Python to the table of functions that the engine calls.

One static table serves all of them; its context pointer is a handle of the Python object. A method that raises OSError
answers with that errno; any other exception is logged, reported, and counts as EIO (C9). Runs on whatever thread steps
the group; cffi takes the GIL for it.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Any

from fabric_core.domain import PEER_NONE, CompletionKind, Domain, Memory, NativeDomain, WorkRequest
from fabric_core.native_lib import ffi, lib

__all__ = ["adapt"]

log = logging.getLogger("fabric.shim")
_HAS_IMM = 1


class _Adapted:
    """What the context pointer names: the domain, and completions that did not fit into the last poll."""

    __slots__ = ("domain", "handle", "on_error", "pending")

    def __init__(self, domain: Domain, on_error: Callable[[BaseException], None]) -> None:
        self.domain = domain
        self.on_error = on_error
        self.pending: list[Any] = []
        self.handle: Any = None


_alive: set[_Adapted] = set()  # until close: C holds only the handle


def adapt(domain: Domain, on_error: Callable[[BaseException], None]) -> NativeDomain:
    """Return the native form of a Python domain. The engine's close() of it ends its life."""
    adapted = _Adapted(domain, on_error)
    adapted.handle = ffi.new_handle(adapted)
    _alive.add(adapted)
    return NativeDomain(
        ops=int(ffi.cast("uintptr_t", lib.fab_py_ops())),
        ctx=int(ffi.cast("uintptr_t", adapted.handle)),
        keepalive=adapted,
    )


def _status(error: BaseException, where: str, adapted: _Adapted | None) -> int:
    if isinstance(error, OSError) and error.errno:
        return -error.errno
    log.error("%s of a Python backend raised; counted as EIO", where, exc_info=error)
    if adapted is not None:
        adapted.on_error(error)
    return -errno.EIO


def _door(function: Callable[..., int | None]) -> Callable[..., int]:
    """Registers `fab_py_<name>` with the two things every callback needs: its object, and no exception into C."""
    name = function.__name__.strip("_")

    def call(ctx: Any, *args: Any) -> int:
        adapted = None
        try:
            adapted = ffi.from_handle(ctx)
            return function(adapted, *args) or 0
        except Exception as error:  # user code cannot hurt the engine (C9)
            return _status(error, name, adapted)

    ffi.def_extern(name=f"fab_py_{name}", error=-errno.EIO)(call)
    return call


@_door
def _caps(a: _Adapted, out: Any) -> None:
    caps = a.domain.caps()
    out.max_write, out.max_send, out.bandwidth = caps.max_write, caps.max_send, caps.bandwidth
    out.numa_node = PEER_NONE if caps.numa is None else caps.numa
    out.flags = 0


@_door
def _address(a: _Adapted, buf: Any, cap: int) -> int:
    data = a.domain.address().encode("ascii")
    if len(data) + 1 > cap:
        return -errno.ENOSPC
    ffi.memmove(buf, data + b"\0", len(data) + 1)
    return len(data)


@_door
def _mr_reg(a: _Adapted, mr: Any, out: Any) -> None:
    keys = a.domain.mr_reg(Memory(mr.addr, mr.len, mr.access, mr.fd, mr.fd_offset, mr.device_kind, mr.device_id))
    out.local_key, out.remote_key, out.remote_base = keys.local_key, keys.remote_key, keys.remote_base


@_door
def _mr_dereg(a: _Adapted, local_key: int) -> None:
    a.domain.mr_dereg(local_key)


@_door
def _peer_open(a: _Adapted, addr: Any, length: int, peer: Any) -> None:
    peer[0] = a.domain.peer_open(ffi.buffer(addr, length)[:].decode("ascii", "replace"))


@_door
def _peer_close(a: _Adapted, peer: int) -> None:
    a.domain.peer_close(peer)


@_door
def _post(a: _Adapted, peer: int, wr: Any, n: int) -> int:
    requests = []
    for i in range(n):
        w = wr[i]
        imm = w.imm if w.flags & _HAS_IMM else None
        requests.append(WorkRequest(w.id, w.kind, w.len, w.local_addr, w.local_key, w.remote_addr, w.remote_key, imm))
    return a.domain.post(peer, requests)


@_door
def _post_recv(a: _Adapted, id: int, addr: int, length: int) -> int:
    return 0 if a.domain.post_recv(id, addr, length) else -errno.EAGAIN


@_door
def _poll(a: _Adapted, out: Any, cap: int, now_ns: int) -> int:
    if len(a.pending) < cap:
        a.pending.extend(a.domain.poll(cap - len(a.pending), now_ns))
    taken, a.pending = a.pending[:cap], a.pending[cap:]
    for i, c in enumerate(taken):
        wc = out[i]
        wc.kind, wc.id, wc.len, wc.status = int(c.kind), c.id, c.length, c.status
        wc.imm, wc.peer, wc.count, wc.reserved = c.imm, c.peer, c.count, 0
    return len(taken)


@_door
def _cancel(a: _Adapted, id: int) -> None:
    a.domain.cancel(id)


@_door
def _wait_fd(a: _Adapted) -> int:
    return a.domain.wait_fd()


@_door
def _arm(a: _Adapted, on: int) -> int:
    return int(a.domain.arm(bool(on)) or bool(a.pending))


@_door
def _counters(a: _Adapted, out: Any, cap: int) -> int:
    found = list(a.domain.counters().items())[:cap]
    for entry, (name, value) in zip(out[0 : len(found)], found, strict=True):
        data = str(name).encode("ascii", "replace")[:31]
        ffi.memmove(entry.name, data + b"\0", len(data) + 1)
        entry.value = int(value)
    return len(found)


def _close(ctx: Any) -> None:
    """As the others, but a void callback must return None."""
    adapted = ffi.from_handle(ctx)
    try:
        adapted.domain.close()
    except Exception as error:
        _status(error, "close", adapted)
    finally:
        _alive.discard(adapted)


ffi.def_extern(name="fab_py_close")(_close)

assert {kind.value for kind in CompletionKind} == {
    lib.FAB_WC_OP,
    lib.FAB_WC_IMM,
    lib.FAB_WC_RECV,
    lib.FAB_WC_PEER_UP,
    lib.FAB_WC_PEER_DOWN,
    lib.FAB_WC_NIC_DOWN,
    lib.FAB_WC_FAULT,
    lib.FAB_WC_NIC_UP,
}, "domain.py and domain.h have drifted apart"
