"""The verbs that submit something: one write, pages, scatter, barrier, send. The hot path's Python half.

Each makes one call into C, which checks every bound and posts at once if the worker is idle. Only a refusal comes back
here, to be waited for (full) or explained (wrong).
"""

from __future__ import annotations

import array
import errno
import os
import time
from collections.abc import Callable, Sequence
from operator import index
from typing import Any

from fabric_core import explain
from fabric_core.base import EngineBase
from fabric_core.core_handle import Remote
from fabric_core.errors import BackendError, BadRange, ConfigError, FabricError, QueueFull, StaleHandle
from fabric_core.native_lib import fast, lib
from fabric_core.operations import Transfer
from fabric_core.pools import RecvPool
from fabric_core.types import Flag, MrDesc, MrHandle, NetAddr, Pages, PeerGroup, ScatterDst

__all__ = ["OnDone", "Submits", "flag_of"]

OnDone = Callable[[Any], object] | Flag | None
_RETRY_NS = 50_000_000


def flag_of(on_done: Any) -> int:
    """Return what names a Flag in C (its address, marked as one that is counted: flag.c), 0 for a callable."""
    if isinstance(on_done, Flag):
        return on_done.ptr | 1
    if not callable(on_done):
        raise TypeError(f"on_done is a callable, a Flag or None, not {type(on_done).__name__}")
    return 0


class Submits(EngineBase):
    """The submitting half of TransferEngine."""

    def _target(self, handle: MrHandle, desc: MrDesc) -> Remote:
        """Return the target's form in C, after a look at what was given as source and target."""
        try:
            if handle._engine is not self:
                raise StaleHandle(f"{handle!r} belongs to another engine: register the memory with this one")
            found: Remote | None = desc._remotes.get(self._tokens[handle.group])
        except AttributeError:
            raise TypeError(
                "a source is (MrHandle, offset or Pages) and a target (MrDesc, offset or Pages), not "
                f"({type(handle).__name__}, ...) and ({type(desc).__name__}, ...)"
            ) from None
        return found if found is not None else self._remote(desc, handle.group)

    def native_target(self, handle: MrHandle, desc: MrDesc) -> int:
        """Number in C of a target, for native callers that write to it from `handle`. Hold `desc` while it is used."""
        return self._target(handle, desc).handle

    def submit_single_write(
        self,
        length: int,
        imm: int | None,
        src: tuple[MrHandle, int],
        dst: tuple[MrDesc, int],
        on_done: OnDone = None,
        *,
        nic: int | None = None,
        timeout: float | None = None,
    ) -> Transfer:
        """Write `length` bytes from (handle, offset) to (descriptor, offset); large ones are spread over all NICs.

        Args:
            imm: immediate to raise once at the receiver (its `alloc_imm`), or None.
            on_done: called with the Transfer on the callback thread, or a Flag to bump.
            nic: index of the one NIC to use.
            timeout: seconds until it fails with DeadlineExceeded; None: `settings.timeout`.

        Raises:
            BadRange, StaleHandle, RemoteAccessError, ConfigError: nothing was submitted. QueueFull, EngineClosed.
        """
        handle, loff = src
        desc, roff = dst
        flag = 0 if on_done is None else flag_of(on_done)
        remote = self._target(handle, desc)
        try:
            rc = fast.submit_write(
                self._address, handle._handle, loff, remote.handle, roff, length, imm, nic, timeout, flag
            )
        except (OverflowError, ValueError) as error:
            raise BadRange(
                f"write of {length} bytes from offset {loff} to offset {roff}, immediate {imm}: {error}"
            ) from None
        if rc < 0:
            rc = self._again(
                rc,
                lambda: fast.submit_write(
                    self._address, handle._handle, loff, remote.handle, roff, length, imm, nic, timeout, flag
                ),
                lambda code: explain.write(self, code, length, imm, handle, loff, desc, roff, nic),
            )
        transfer = Transfer(self, rc)
        if on_done is not None and not flag:
            self._callbacks.add(transfer, on_done)  # type: ignore[arg-type]
        return transfer

    def submit_paged_writes(
        self,
        page_len: int,
        imm: int | None,
        src: tuple[MrHandle, Pages],
        dst: tuple[MrDesc, Pages],
        on_done: OnDone = None,
        *,
        nic: int | None = None,
        timeout: float | None = None,
    ) -> Transfer:
        """Write pages: page k of `src` to page k of `dst`, `page_len` bytes each; each raises the immediate once.

        The page lists go down in one call and are copied; nothing is done per page in Python. Pages go round robin over
        the NICs. Arguments and errors as for `submit_single_write`.
        """
        handle, s = src
        desc, d = dst
        flag = 0 if on_done is None else flag_of(on_done)
        remote = self._target(handle, desc)

        def submit() -> int:
            try:
                return fast.submit_paged(  # type: ignore[no-any-return]
                    self._address, handle._handle, s.indices, s.stride, s.offset,
                    remote.handle, d.indices, d.stride, d.offset, page_len, imm, nic, timeout, flag,
                )  # fmt: skip
            except (OverflowError, ValueError) as error:
                raise BadRange(f"paged write of {page_len} bytes a page, from {s!r} to {d!r}: {error}") from None

        rc = submit()
        if rc < 0:
            rc = self._again(rc, submit, lambda code: explain.paged(self, code, page_len, imm, handle, s, desc, d, nic))
        return self._submitted(rc, on_done, flag)

    def submit_scatter(
        self,
        group: PeerGroup | None,
        on_done: OnDone,
        imm: int | None,
        src: MrHandle,
        dst: Sequence[ScatterDst],
        *,
        nic: int | None = None,
        timeout: float | None = None,
    ) -> Transfer:
        """Write one slice of `src` to each target, in one operation; each target's immediate counts once.

        `group`, if given, must hold every target's peer.
        """
        self._check_group(group, [t.desc for t in dst])
        return self._submit_many(lib.FAB_OP_SCATTER, src, list(dst), on_done, imm, nic, timeout)

    def submit_barrier(
        self,
        group: PeerGroup | None,
        on_done: OnDone,
        imm: int,
        dst: Sequence[MrDesc],
        *,
        nic: int | None = None,
        timeout: float | None = None,
    ) -> Transfer:
        """Raise `imm` once at the owner of each descriptor, without payload (a zero-length write)."""
        if imm is None:
            raise ConfigError("a barrier is its immediate: give the imm that its targets wait for")
        self._check_group(group, dst)
        return self._submit_many(
            lib.FAB_OP_BARRIER, None, [ScatterDst(desc, 0) for desc in dst], on_done, imm, nic, timeout
        )

    def _check_group(self, group: PeerGroup | None, descs: Sequence[MrDesc]) -> None:
        if group is not None:
            for desc in descs:
                if desc.addr not in group:
                    raise ConfigError(f"{desc.addr} is a target but no member of {group!r}")

    def _submit_many(
        self,
        op: int,
        src: MrHandle | None,
        dst: list[ScatterDst],
        on_done: OnDone,
        imm: int | None,
        nic: int | None,
        timeout: float | None,
    ) -> Transfer:
        if not dst:
            raise BadRange("no targets: a scatter or barrier has at least one")
        flag = 0 if on_done is None else flag_of(on_done)
        if src is not None and not isinstance(src, MrHandle):
            raise TypeError(f"the source of a scatter is an MrHandle, not {type(src).__name__}")
        if src is not None and src._engine is not self:
            raise StaleHandle(f"{src!r} belongs to another engine: register the memory with this one")
        in_group = src.group if src is not None else 0
        targets = array.array("Q")
        held = [self._remote(t.desc, in_group) for t in dst]
        try:
            for t, remote in zip(dst, held, strict=True):
                targets.extend((remote.handle, index(t.src_offset), index(t.dst_offset), index(t.length)))
        except (OverflowError, TypeError) as error:
            raise BadRange(f"{t!r}: offsets and lengths are integers from 0 to 2**64 - 1: {error}") from None
        local = src._handle if src is not None else 0

        def submit() -> int:
            try:
                return fast.submit_many(self._address, op, local, targets, imm, nic, timeout, flag)  # type: ignore[no-any-return]
            except (OverflowError, ValueError) as error:
                raise BadRange(f"immediate {imm}, timeout {timeout}: {error}") from None

        rc = submit()
        if rc < 0:
            rc = self._again(rc, submit, lambda code: explain.many(self, code, imm, src, dst, nic))
        return self._submitted(rc, on_done, flag)

    def submit_send(
        self, addr: NetAddr | str, msg: Any, on_done: OnDone = None, *, timeout: float | None = None
    ) -> Transfer:
        """Send a message (bytes-like, at most `max_message`), copied at once; done when a receive has taken it."""
        flag = 0 if on_done is None else flag_of(on_done)
        to = self._addr(addr)

        def submit() -> int:
            return fast.submit_send(self._address, 0, self._peer(0, to), msg, timeout, flag)  # type: ignore[no-any-return]

        rc = submit()
        if rc < 0:
            rc = self._again(rc, submit, lambda code: explain.send(self, code, msg))
        return self._submitted(rc, on_done, flag)

    def submit_recvs(self, length: int, count: int, on_message: Callable[[bytes], object]) -> RecvPool:
        """Post `count` buffers of `length` bytes; `on_message(bytes)` runs on the callback thread for each message."""
        self._check_open()
        if not callable(on_message):
            raise ConfigError(f"on_message is called with each message; {on_message!r} cannot be called")
        if not (isinstance(length, int) and 0 <= length <= 1 << 30 and isinstance(count, int) and 1 <= count <= 65536):
            raise BadRange(f"submit_recvs({length!r}, {count!r}): 0 to 2**30 bytes, 1 to 65536 buffers")
        with self._lock:
            self._pools += 1
            number = self._pools
        pool = RecvPool(self, number, length, count)
        self._callbacks.add_pool(number, length, on_message)
        rc = lib.fab_recvs_add(self._core.pointer, 0, number, length, count)
        if rc < 0:
            pool.close()
            self._check_open()
            raise BackendError(f"{count} receives of {length} bytes cannot be posted: {os.strerror(-rc)}")
        return pool

    def _submitted(self, handle: int, on_done: OnDone, flag: int) -> Transfer:
        transfer = Transfer(self, handle)
        if on_done is not None and not flag:
            self._callbacks.add(transfer, on_done)  # type: ignore[arg-type]
        return transfer

    def _again(self, rc: int, submit: Callable[[], int], explained: Callable[[int], FabricError]) -> int:
        """A submit was refused: wait for room without the GIL if it was full (C8), else raise what was wrong."""
        deadline = time.monotonic() + self.settings.submit_timeout
        if rc == -errno.ESRCH:  # the engine forgot a peer that was lost long ago: its number is looked up anew
            self._peers.clear()
            rc = submit()
        while rc == -errno.EAGAIN:
            left = deadline - time.monotonic()
            if left <= 0:
                raise QueueFull(
                    f"the engine took no further work for {self.settings.submit_timeout:g} s "
                    f"({self.settings.max_inflight} operations in flight at most): wait for transfers, or see in "
                    "engine.stats() which peer does not keep up"
                )
            lib.fab_wait_room(self._core.pointer, min(_RETRY_NS, int(left * 1e9)))
            rc = submit()
        if rc < 0:
            self._check_open()
            raise explained(rc)
        return rc
