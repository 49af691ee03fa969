"""Stream-ordered forms: a GPU stream, or a graph captured from one, starts transfers and waits for their ends.

Neither Python nor a host synchronisation is on the path. A stream starts a prepared transfer by adding to a word that
the watcher's thread looks at; it waits for a flag, a word that the engine bumps.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

from fabric_core.core_handle import Remote
from fabric_core.errors import (
    BackendError,
    BadRange,
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    FabricError,
    QueueFull,
    RemoteAccessError,
    StaleHandle,
    Unsupported,
)
from fabric_core.native_lib import ffi, lib
from fabric_core.pools import UvmWatcher
from fabric_core.types import Flag, MrDesc, MrHandle, Pages

if TYPE_CHECKING:
    from fabric_core.base import EngineBase
    from fabric_core.sequence import PreparedSequence

__all__ = ["Prepared", "add", "gpu_of", "prepare", "refusal", "wait", "write"]

_WHY: dict[int, tuple[type[FabricError], str]] = {
    errno.ERANGE: (BadRange, "the source or the target lies outside its memory"),
    errno.EBADF: (StaleHandle, "the source is not registered any more"),
    errno.ESTALE: (StaleHandle, "the descriptor is not known any more"),
    errno.ESHUTDOWN: (EngineClosed, "the engine is closed"),
    errno.EINVAL: (BadRange, "the immediate is none, or there are no pages"),
    errno.EXDEV: (ConfigError, "the source and the target belong to different devices of this engine"),
    errno.EACCES: (RemoteAccessError, "the target's owner registered it with write=False"),
    errno.ENODEV: (ConfigError, "this engine has no such NIC"),
    errno.EAGAIN: (QueueFull, "the engine is full, and stayed so for a millisecond: raise FABRIC_MAX_INFLIGHT"),
    errno.ETIME: (DeadlineExceeded, "its deadline has passed"),
}


def gpu_of(engine: EngineBase, device: str | None) -> int:
    """Return the ordinal of the engine's GPU, or of the named one. Raises Unsupported if it serves none."""
    from fabric_core import gpu

    found = gpu.served(engine.devices, device)
    if found is None:
        asked = f"does not serve {device}" if device else "serves no GPU"
        raise Unsupported(f"this engine {asked}: open it with device='cuda:0'")
    return found


class Prepared:
    """A write, or pages, submitted each time a stream gets to it. Made by `prepare_write`, `prepare_paged_writes`.

    It holds its memory: closing it, or the engine, lets go. What was submitted goes on.
    """

    def __init__(self, engine: EngineBase, pointer: Any, word: int, device: int, flag: Flag, held: object) -> None:
        self._engine = engine
        self._core = engine._core
        self._pointer = pointer
        self._device = device
        self._held = held
        self.ptr = word  #: address of the u64 that starts it: kernels may add to it themselves (system scope)
        self.flag = flag  #: bumped at each end; GPUs reach it too
        self.closed = False

    @property
    def submitted(self) -> int:
        """How often it was submitted, or was refused. Raises what the last refusal was about."""
        if self.closed:
            raise StaleHandle("this prepared transfer is closed")
        refused = ffi.new("int32_t *")
        count: int = lib.fab_prepared_count(self._pointer, refused)
        if refused[0] < 0:
            raise refusal(refused[0], "a prepared transfer was refused")
        return count

    def close(self) -> None:
        """Submit no more. Idempotent."""
        if not self.closed:
            self.closed = True
            self._held = None
            if self._core.address:  # else the interpreter ends, and the C engine went first
                lib.fab_prepared_close(self._pointer)
                lib.fab_cuda_word_free(self.ptr)

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and self._core.pid == os.getpid():
            self.close()

    def __repr__(self) -> str:
        return f"<Prepared, word {self.ptr:#x}{', closed' if self.closed else ''}>"


def refusal(rc: int, what: str) -> FabricError:
    """Return why the C engine has refused something prepared."""
    kind, why = _WHY.get(-rc, (BackendError, os.strerror(-rc)))
    return kind(f"{what}: {why}")


def prepare(
    engine: Any,
    src: tuple[MrHandle, int | Pages],
    dst: tuple[MrDesc, int | Pages],
    length: int,
    imm: int | None,
    flag: Flag | None,
    nic: int | None,
    timeout: float | None,
    device: str | None,
) -> Prepared:
    """See TransferEngine.prepare_write and prepare_paged_writes."""
    number = gpu_of(engine, device)
    (handle, s), (desc, d) = src, dst
    remote: Remote = engine._target(handle, desc)
    flag = flag if flag is not None else engine.gpu_flag(device)
    if not isinstance(flag, Flag):
        raise ConfigError(f"a prepared transfer bumps a Flag; {flag!r} is none")
    if (imm is not None and imm < 0) or (nic is not None and nic < 0):  # C takes a negative number for "none"
        raise BadRange(f"imm={imm!r}, nic={nic!r}: None, or 0 and more")
    word = lib.fab_cuda_word_new(number)
    if not word:
        raise BackendError(f"no pinned host memory for a word that cuda:{number} reaches")
    rc, pointer = ffi.new("int *"), ffi.NULL
    core = engine._core.pointer
    try:
        ns = 0 if timeout is None else max(1, int(timeout * 1e9))
        last = (-1 if imm is None else imm, -1 if nic is None else nic, ns, flag.ptr | 1, word, rc)
        if isinstance(s, Pages) and isinstance(d, Pages):
            si, di = ffi.from_buffer("uint32_t[]", s.indices), ffi.from_buffer("uint32_t[]", d.indices)
            if len(si) != len(di):
                raise BadRange(f"{len(si)} source pages, {len(di)} target pages")
            pointer = lib.fab_prepare_paged(
                core, handle._handle, si, s.stride, s.offset,
                remote.handle, di, d.stride, d.offset, len(si), length, *last,
            )  # fmt: skip
        else:
            pointer = lib.fab_prepare_write(core, handle._handle, s, remote.handle, d, length, *last)
    except (OverflowError, TypeError, ValueError) as error:
        raise BadRange(f"{length!r} bytes from {s!r} to {d!r}, imm={imm!r}, timeout={timeout!r}: {error}") from None
    finally:
        if pointer == ffi.NULL:
            lib.fab_cuda_word_free(word)
    if pointer == ffi.NULL:
        raise refusal(rc[0], "this transfer cannot be prepared")
    return Prepared(engine, pointer, word, number, flag, (handle, desc, remote))


def add(prepared: Prepared | PreparedSequence, stream: Any) -> None:
    """See TransferEngine.stream_submit."""
    from fabric_core import gpu

    if prepared.closed:
        raise StaleHandle(f"{prepared!r} is closed")
    if prepared._device is None:
        raise Unsupported(f"{prepared!r} has a word that no GPU reaches: open its engine with device='cuda:0'")
    rc = lib.fab_cuda_stream_add(prepared._device, gpu.stream_of(stream), prepared.ptr, 1)
    gpu.told(rc, "stream_submit()")


def write(
    engine: EngineBase, what: UvmWatcher | Flag | PreparedSequence, value: int, stream: Any, device: str | None
) -> None:
    """See TransferEngine.stream_signal."""
    from fabric_core import gpu

    if not 0 <= value < 1 << 64:
        raise BadRange(f"value={value!r}: a word holds 0 to 2**64 - 1")
    if getattr(what, "closed", False):  # its word may be another's by now
        raise StaleHandle(f"{what!r} is closed")
    gpu.told(
        lib.fab_cuda_stream_write(gpu_of(engine, device), gpu.stream_of(stream), what.ptr, value), "stream_signal()"
    )


def wait(engine: EngineBase, flag: Flag, value: int, stream: Any, device: str | None) -> None:
    """See TransferEngine.stream_wait."""
    from fabric_core import gpu

    if not 0 <= value < 1 << 31:
        raise BadRange(f"value={value!r}: a stream waits for 0 to 2**31 - 1 ends")
    gpu.told(lib.fab_cuda_stream_wait(gpu_of(engine, device), gpu.stream_of(stream), flag.ptr, value), "stream_wait()")
