"""The values of the API: addresses, descriptors, handles, page lists. Plain data, no threads, no I/O."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabric_core import wire
from fabric_core.errors import BadRange, ConfigError, ProtocolError
from fabric_core.native_lib import fast, ffi, lib

if TYPE_CHECKING:
    from fabric_core.base import EngineBase

__all__ = ["Flag", "MrDesc", "MrHandle", "NetAddr", "Pages", "PeerGroup", "ScatterDst", "SharedMemory"]

_U64 = (1 << 64) - 1


def _check_domain(domain: str) -> str:
    if (
        not domain
        or len(domain) > 255
        or not domain.isascii()
        or not domain.isprintable()
        or "," in domain
        or " " in domain
    ):
        raise ProtocolError(
            f"{domain!r} is no address of a NIC: 1 to 255 printable ASCII characters without commas and blanks"
        )
    return domain


@dataclass(frozen=True, slots=True)
class NetAddr:
    """Where an engine is reached: a backend's name and one address per NIC. Hashable; `str()` and `parse` go round."""

    backend: str
    domains: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.backend or len(self.backend) > 64 or not self.backend.replace("-", "_").isidentifier():
            raise ProtocolError(f"{self.backend!r} is no name of a backend")
        if not 1 <= len(self.domains) <= wire.MAX_DOMAINS:
            raise ProtocolError(f"an address has 1 to {wire.MAX_DOMAINS} NICs, not {len(self.domains)}")
        for domain in self.domains:
            _check_domain(domain)

    @classmethod
    def parse(cls, text: str) -> NetAddr:
        """Read "backend:nic0,nic1,..."; "local:NAME" is enough to find whoever answers under a name now.

        Raises ProtocolError naming what is wrong.
        """
        if not isinstance(text, str):
            raise ProtocolError(f"an address is text like 'local:NAME', not {type(text).__name__}")
        backend, colon, rest = text.strip().partition(":")
        if not colon or len(text) > wire.ADDR_MAX:
            raise ProtocolError(
                f"{text[:80]!r} is no address: expected 'backend:address', for example 'local:decoder0'"
            )
        return cls(backend, tuple(rest.split(",")))

    def __str__(self) -> str:
        return f"{self.backend}:{','.join(self.domains)}"

    def to_bytes(self) -> bytes:
        """Return the wire form."""
        return wire.encode("addr", (self.backend, list(self.domains)))

    @classmethod
    def from_bytes(cls, data: Any) -> NetAddr:
        """Read the wire form. Raises ProtocolError for anything else (C12)."""
        backend, domains = wire.decode("addr", data)
        return cls(backend, tuple(domains))


class MrDesc:
    """A peer's registered memory: what one must know to write into it. Serialisable, hashable, immutable.

    Treat it as a capability: who holds it may write there. `repr` leaves the keys out, so that logs do not leak it.
    """

    __slots__ = ("_remotes", "access", "addr", "bases", "keys", "nbytes", "ptr")

    def __init__(
        self, addr: NetAddr, ptr: int, nbytes: int, access: int, keys: Sequence[int], bases: Sequence[int]
    ) -> None:
        numbers = (ptr, nbytes, access, *keys, *bases)
        if any(not 0 <= number <= _U64 for number in numbers) or ptr + nbytes > _U64 + 1:
            raise ProtocolError("a descriptor holds unsigned 64-bit numbers and a range that fits them")
        if not len(keys) == len(bases) == len(addr.domains):
            raise ProtocolError(
                f"a descriptor has a key and a base for each NIC: {len(addr.domains)} NICs, {len(keys)} keys, "
                f"{len(bases)} bases"
            )
        self.addr = addr  #: NetAddr of the engine that owns the memory
        self.ptr = ptr  #: its virtual address there
        self.nbytes = nbytes
        self.access = access  #: bit 0: peers may write
        self.keys = tuple(keys)
        self.bases = tuple(bases)
        self._remotes: dict[int, Any] = {}  # engine's token -> Remote, see EngineBase._remote

    @property
    def writable(self) -> bool:
        """Whether peers may write there."""
        return bool(self.access & 1)

    def to_bytes(self) -> bytes:
        """Return the wire form."""
        a = self.addr
        return wire.encode(
            "desc", (a.backend, list(a.domains), self.ptr, self.nbytes, self.access, list(self.keys), list(self.bases))
        )

    @classmethod
    def from_bytes(cls, data: Any) -> MrDesc:
        """Read the wire form. Raises ProtocolError for anything else (C12)."""
        backend, domains, ptr, nbytes, access, keys, bases = wire.decode("desc", data)
        return cls(NetAddr(backend, tuple(domains)), ptr, nbytes, access, keys, bases)

    def _identity(self) -> tuple[Any, ...]:
        return (self.addr, self.ptr, self.nbytes, self.access, self.keys, self.bases)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MrDesc) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f"MrDesc({self.nbytes} bytes at {self.addr}{'' if self.writable else ', read-only'})"


class MrHandle:
    """Memory of ours that an engine has registered. Keeps the object it was made from alive; close it, or the engine.

    Also a context manager.
    """

    __slots__ = ("_engine", "_handle", "device", "group", "nbytes", "owner", "ptr")

    def __init__(
        self, engine: EngineBase, handle: int, ptr: int, nbytes: int, device: str, group: int, owner: object
    ) -> None:
        self._engine = engine
        self._handle = handle
        self.ptr = ptr
        self.nbytes = nbytes
        self.device = device
        self.group = group
        self.owner = owner

    @property
    def closed(self) -> bool:
        """Whether it was deregistered."""
        return self._handle == 0

    @property
    def native_handle(self) -> int:
        """Its number in C, for native callers (`native_api`); 0 once closed."""
        return self._handle

    def close(self, timeout: float | None = None) -> None:
        """Deregister; see `TransferEngine.dereg_mr`. Idempotent."""
        if self._handle:
            self._engine.dereg_mr(self, timeout)

    def __enter__(self) -> MrHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MrHandle({self.nbytes} bytes at {self.ptr:#x}, {self.device}{', closed' if self.closed else ''})"


class Pages:
    """Which pages of a region: page k lies at offset + indices[k] * stride (bytes).

    `indices` is any C-contiguous buffer of 32-bit integers (numpy uint32/int32, array('I'), a torch int32 CPU tensor),
    taken without a loop, or any sequence of ints (converted). The engine copies it at submit.
    """

    __slots__ = ("indices", "offset", "stride")

    def __init__(self, indices: Any, stride: int, offset: int = 0) -> None:
        if isinstance(indices, list | tuple | range):
            try:
                indices = array.array("I", indices)
            except (OverflowError, TypeError) as error:
                raise BadRange(f"page indices are integers from 0 to 2**32 - 1: {error}") from None
        elif hasattr(indices, "data_ptr") and hasattr(indices, "numpy"):  # a torch tensor has no buffer protocol
            indices = indices.numpy()
        if getattr(getattr(indices, "dtype", None), "itemsize", 4) == 8 and hasattr(indices, "astype"):
            if len(indices) and (int(indices.min()) < 0 or int(indices.max()) > 0xFFFFFFFF):
                raise BadRange(f"page indices go from 0 to 2**32 - 1, these from {indices.min()} to {indices.max()}")
            indices = indices.astype("uint32")
        self.indices = indices
        self.stride = stride
        self.offset = offset

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        return f"Pages({len(self.indices)} pages, stride={self.stride}, offset={self.offset})"


@dataclass(frozen=True, slots=True)
class ScatterDst:
    """One target of a scatter: `length` bytes from `src_offset` of the source to `dst_offset` of `desc`."""

    desc: MrDesc
    length: int
    src_offset: int = 0
    dst_offset: int = 0


class PeerGroup:
    """Peers that are often written together. Each counts once, however often it is named."""

    __slots__ = ("_members", "addrs")

    def __init__(self, addrs: Iterable[NetAddr]) -> None:
        self.addrs: tuple[NetAddr, ...] = tuple(dict.fromkeys(addrs))  #: each peer once
        self._members = frozenset(self.addrs)

    def __contains__(self, addr: object) -> bool:
        return addr in self._members

    def __len__(self) -> int:
        return len(self.addrs)

    def __repr__(self) -> str:
        return f"PeerGroup({len(self.addrs)} peers)"


class Flag:
    """A word in memory that operations bump when they end: for code that polls, also native code.

    The low 32 bits count the operations that ended, the high 32 bits those of them that ended badly. It is bumped last:
    who sees it finds the operation ended, while somebody who waits for the operation may be a moment earlier.
    """

    __slots__ = ("_pid", "ptr")

    def __init__(self, gpu: int | None = None) -> None:
        """`gpu`: ordinal of a GPU whose driver makes a word that GPUs reach too; see `TransferEngine.gpu_flag`."""
        made = lib.fab_flag_new() if gpu is None else lib.fab_flag_new_on(gpu)
        self._pid = os.getpid()
        self.ptr: int = made  #: address of the u64; it outlives the operations that name this flag
        if not self.ptr:
            raise MemoryError("no memory for a flag")

    def __del__(self) -> None:
        if getattr(self, "ptr", 0) and self._pid == os.getpid():  # the child of a fork has no memory of the driver's
            lib.fab_flag_drop(self.ptr)

    @property
    def value(self) -> int:
        """The whole word, read with acquire: what the ended operations did is visible."""
        word: int = fast.load_u64(self.ptr)
        return word

    @property
    def done(self) -> int:
        """How many operations ended."""
        return self.value & 0xFFFFFFFF

    @property
    def failed(self) -> int:
        """How many of them ended badly (failed or cancelled)."""
        return self.value >> 32

    def reset(self) -> None:
        """Back to zero; only while no operation that names it is in flight."""
        fast.store_u64(self.ptr, 0)

    def __repr__(self) -> str:
        return f"Flag(done={self.done}, failed={self.failed})"


class SharedMemory(mmap.mmap):
    """Host memory that a peer process on this host can map: zeroed, page aligned, with the buffer protocol.

    `numpy.frombuffer(m, ...)` and `torch.frombuffer(m, ...)` make arrays over it without a copy; registering such an
    array is registering this memory. Made by `TransferEngine.empty`.
    """

    fd: int
    ptr: int

    def __new__(cls, nbytes: int) -> SharedMemory:
        if not isinstance(nbytes, int) or not 0 < nbytes < 1 << 62:
            raise ConfigError(f"empty() takes a number of bytes above 0, not {nbytes!r}")
        fd = os.memfd_create("fabric", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            # a peer that maps it must not meet SIGBUS because somebody made it shorter
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self = super().__new__(cls, fd, nbytes, flags=flags)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.ptr = int(ffi.cast("uintptr_t", ffi.from_buffer(self)))
        return self

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)
            del self.fd

    def __repr__(self) -> str:
        return f"SharedMemory({len(self)} bytes)"
