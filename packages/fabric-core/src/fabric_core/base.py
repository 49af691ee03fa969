"""What every part of the engine stands on: opening and closing, memory, peers. `TransferEngine` adds the verbs."""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import logging
import math
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from fabric_core.callbacks import CallbackThread
from fabric_core.core_handle import Core, Remote
from fabric_core.domain import MAX_NICS, Domain, GroupConfig, NativeDomain
from fabric_core.errors import (
    BackendError,
    BadRange,
    ConfigError,
    EngineClosed,
    QueueFull,
    StaleHandle,
    Unsupported,
)
from fabric_core.memory import range_of
from fabric_core.native_lib import ffi, lib
from fabric_core.placement import placement
from fabric_core.types import MrDesc, MrHandle, NetAddr, PeerGroup, SharedMemory

if TYPE_CHECKING:
    from fabric_core.config import Settings

__all__ = ["EngineBase"]

log = logging.getLogger("fabric")

_FEW_CORES = 4
_LONGEST_CLOSE = 1e6  # seconds
_PEER_SLOT = 0xFFFF  # the part of a peer's number that does not change when its slot goes to another
_tokens = itertools.count()


class EngineBase:
    """An open engine: its groups, its memory, its peers."""

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("use TransferEngine.open(...)")

    # ---- life ------------------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        device: str = "cpu",
        backend: str | None = None,
        *,
        devices: Sequence[str] | None = None,
        nics: int | None = None,
        name: str | None = None,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> Self:
        """Open an engine with one DomainGroup per device.

        Args:
            device: "cpu", "cpu:1" (memory of a NUMA node), "cuda:0" (a GPU's memory, and host memory).
            backend: name of a backend, "auto" for the best that works here; default FABRIC_BACKEND, or "auto".
            devices: several devices; `device` is then ignored.
            nics: NICs per group, 1 to 8; default all that belong to the device (local: 1).
            name: base of this engine's address where the backend has names; default random.
            settings: all settings; single fields can be given as further keyword arguments.

        Raises:
            ConfigError: a setting or name makes no sense. Unsupported, BackendError: this machine cannot.
        """
        from fabric_core import registry
        from fabric_core.config import Settings

        if settings is None:
            settings = Settings.load(backend=backend, nics=nics, **overrides)
        elif overrides or backend is not None or nics is not None:
            settings = settings.replace(backend=backend, nics=nics, **overrides)
        wanted = [device] if devices is None else [devices] if not isinstance(devices, Sequence) else list(devices)
        if not all(isinstance(one, str) for one in (*wanted, name or "")):
            raise ConfigError(f"devices and names are text: device={wanted!r}, name={name!r}")
        if not wanted or len(wanted) > 16 or len(set(wanted)) != len(wanted):
            raise ConfigError(f"devices= takes 1 to 16 different devices, not {wanted!r}")
        wanted = ["cuda:0" if one == "cuda" else one for one in wanted]
        if name is None:
            name = f"e{os.getpid()}-{secrets.token_hex(4)}"
        elif not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise ConfigError(f"name={name!r}: a name has 1 to 64 letters, digits, '-' and '_'")
        self = cls.__new__(cls)
        self._start(registry.select(settings.backend, allow=settings.backends), settings, wanted, name)
        return self

    def _start(self, backend: Any, settings: Settings, devices: list[str], name: str) -> None:
        self.settings = settings
        self._known_address: Callable[[str], bool] = getattr(backend, "known_address", lambda _domain: True)
        self._backend_words: Callable[[str, str, int], str] = getattr(backend, "words", lambda *_: "")
        self.backend: str = backend.name
        self.devices = tuple(devices)
        self.name = name
        self.on_error: Callable[[BaseException], object] | None = None  #: hears of raising callbacks and faults
        self.on_peer_lost: Callable[[Any], object] | None = None  #: hears a PeerLost for each peer that is lost
        self._closed = False
        self._lock = threading.Lock()
        self._names: dict[tuple[int, int], NetAddr] = {}
        self._peers: dict[tuple[int, NetAddr], int] = {}
        self._slots: dict[tuple[int, int], int] = {}  # which peer number is in use in each slot of the engine's table
        self._shared: weakref.WeakSet[Any] = weakref.WeakSet()
        self._keep: list[object] = []
        self._faults: list[list[Any]] = []  # switches of the NICs of each group: fabric_core.faults
        self._owners: dict[int, object] = {}  # registered memory stays, whoever keeps its handle or not (C7)
        self._pools = 0
        self._tokens = [next(_tokens) for _ in devices]  # names a group of this engine, once and for all
        busy = settings.polling == "busy"
        cores = len(os.sched_getaffinity(0))
        spin_us = settings.spin_us if settings.spin_us is not None else (20 if cores <= _FEW_CORES else 200)
        cfg = ffi.new(
            "fab_engine_cfg *",
            {
                "imm_slots": settings.imm_slots,
                "max_inflight": settings.max_inflight,
                "max_peers": 65536,
                "busy": int(busy),
                "hand_over": int(cores <= _FEW_CORES and not busy),
                "spin_ns": spin_us * 1000,
                "timeout_ns": int(settings.timeout * 1e9),
                "inline_bytes": 65536,
                "shard_bytes": 32768,
            },
        )
        pointer = lib.fab_engine_new(cfg)
        if pointer == ffi.NULL:
            raise BackendError(f"not enough memory for an engine with {settings.imm_slots} immediates")
        self._core = Core(pointer)
        self._address = self._core.address
        try:
            addrs = [self._open_group(backend, device, i) for i, device in enumerate(devices)]
        except BaseException:
            lib.fab_engine_close(pointer, 0)
            raise
        self._addrs = addrs
        self.address: NetAddr = addrs[0]  #: where peers reach this engine (its first group)
        self.nics: int = len(addrs[0].domains)  #: NICs per group
        caps = ffi.new("fab_domain_caps *")
        lib.fab_group_caps(pointer, 0, 0, caps)
        self.max_message: int = caps.max_send  #: bytes of one message at most
        self._callbacks = CallbackThread(self)
        _engines.add(self)

    def _open_group(self, backend: Any, device: str, index: int) -> NetAddr:
        numa, cpus = placement(device)
        name = self.name if index == 0 else f"{self.name}-g{index}"
        domains = backend.open_group(
            GroupConfig(device=device, name=name, nics=self.settings.nics, settings=self.settings, numa=numa)
        )
        if not 1 <= len(domains) <= MAX_NICS:
            raise BackendError(f"backend {backend.name!r} opened {len(domains)} domains; a group has 1 to {MAX_NICS}")
        native = [self._native(d) for d in domains]
        if self.settings.faults is not None:
            from fabric_core import faults

            native = faults.wrap(native, faults.Plan.parse(self.settings.faults), index)
            self._faults.append([d.keepalive[1] for d in native])  # type: ignore[index]
        worker = 2 if any(isinstance(d, Domain) for d in domains) else 1
        self._keep.extend(native)
        mask = ffi.new("uint64_t[16]")
        if self.settings.pin_cpus:
            for cpu in cpus:
                if cpu < 1024:
                    mask[cpu // 64] |= 1 << (cpu % 64)
        group = lib.fab_group_open(
            self._core.pointer, len(native), [d.ops for d in native], [d.ctx for d in native], mask, worker
        )
        if group < 0:
            for d in native:
                ops = ffi.cast("const fab_domain_ops *", d.ops)
                ops.close(ffi.cast("void *", d.ctx))
            raise BackendError(
                f"backend {backend.name!r} gave a table of functions that this engine cannot drive "
                f"({os.strerror(-group)}): it was built for another version of fabric-core"
                if group == -errno.EPROTO
                else f"a DomainGroup over backend {backend.name!r} cannot be opened: {os.strerror(-group)}"
            )
        found = []
        buffer = ffi.new("char[512]")
        for nic in range(len(native)):
            n = lib.fab_group_address(self._core.pointer, group, nic, buffer, 512)
            if n < 0:
                raise BackendError(f"NIC {nic} of backend {backend.name!r} has no address: {os.strerror(-n)}")
            found.append(ffi.string(buffer).decode("ascii"))
        return NetAddr(backend.name, tuple(found))

    def _native(self, domain: NativeDomain | Domain) -> NativeDomain:
        if isinstance(domain, NativeDomain):
            return domain
        from fabric_core import shim

        return shim.adapt(domain, self._report)

    def _report(self, error: BaseException) -> None:
        self._callbacks.report(error)  # looked up late: domains are opened before the callback thread

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    @property
    def native_handle(self) -> int:
        """Address of the C engine, for native callers (`fabric_core.native_api`). Valid while this object lives."""
        return self._core.address

    def close(self, timeout: float = 5.0) -> None:
        """End everything: what is in flight ends as cancelled (C1), callbacks are delivered, NICs let go. Idempotent.

        `timeout` bounds each of the two waits (for the NICs, for running callbacks). Works from a callback too.
        """
        if not isinstance(timeout, int | float) or math.isnan(timeout):
            raise ConfigError(f"close(timeout={timeout!r}): a number of seconds")
        timeout = max(0.0, min(timeout, _LONGEST_CLOSE))
        with self._lock:
            if self._closed:
                return
            self._closed = True
        _engines.discard(self)
        if self._core.pid != os.getpid():
            return
        rc = lib.fab_engine_close(self._core.pointer, int(timeout * 1e9))
        if rc:
            log.warning(
                "close() of %r: a NIC did not let go of its work within %g s; it was closed by force", self, timeout
            )
        self._owners.clear()
        self._callbacks.stop(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and hasattr(self, "_callbacks"):
            with contextlib.suppress(Exception):
                self.close(1.0)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}{' closed' if self._closed else ''}>"

    def __reduce__(self) -> Any:
        raise TypeError("an engine cannot be pickled: open one in each process and exchange addresses")

    # ---- memory ----------------------------------------------------------------------------------------------------

    def empty(self, nbytes: int) -> SharedMemory:
        """Return zeroed host memory that peers on this host can map: the fastest to write into. See `SharedMemory`."""
        self._check_open()
        try:
            memory = SharedMemory(nbytes)
        except OSError as error:
            raise BackendError(f"empty({nbytes}): {error.strerror}; see /dev/shm and memory limits") from None
        with self._lock:
            self._shared.add(memory)
        return memory

    def reg_mr(self, x: Any, device: str | None = None, *, write: bool = True) -> tuple[MrHandle, MrDesc]:
        """Register memory: a torch tensor, array (CUDA too), buffer, mmap, `empty()`, (address, bytes[, device]).

        Args:
            device: which group's NICs serve it; default: of GPU memory its GPU's, else the first.
            write: whether peers that hold the descriptor may write there.

        Returns:
            The handle (source of our own transfers) and the descriptor (for peers).

        Raises:
            BadRange: no contiguous, non-empty memory. Unsupported: memory of a GPU that no group of this engine serves.
            BackendError: the NIC refused.
        """
        self._check_open()
        ptr, nbytes, where, owner = range_of(x)
        on_gpu = where != "cpu"
        if on_gpu and (where not in self.devices or device not in (None, where)):
            raise Unsupported(
                f"this memory is on {where}, and {device or ', '.join(self.devices)} does not serve it: "
                f"open an engine with device={where!r} (or devices=), and register it there"
            )
        group = self._group_of(where if on_gpu else device)
        if write and isinstance(owner, tuple) and memoryview(owner[0]).readonly:
            raise BadRange(f"this {type(x).__name__} is read-only: register it with write=False, as a source only")
        mr = ffi.new("fab_mr *", {"addr": ptr, "len": nbytes, "access": int(write), "fd": -1, "device_id": -1})
        if on_gpu:
            mr.device_kind, mr.device_id = 1, int(where.partition(":")[2])
        with self._lock:
            shared = list(self._shared)
        for memory in shared:
            if not on_gpu and not memory.closed and memory.ptr <= ptr and ptr + nbytes <= memory.ptr + len(memory):
                mr.fd, mr.fd_offset = memory.fd, ptr - memory.ptr
                break
        nics = len(self._addrs[group].domains)
        keys = ffi.new("fab_mr_keys[]", nics)
        handle = lib.fab_mem_reg(self._core.pointer, group, mr, keys)
        if handle < 0:
            self._check_open()
            cure = "; close() handles that are no longer needed" if handle == -errno.ENOSPC else ""
            raise BackendError(
                f"{nbytes} bytes at {ptr:#x} cannot be registered with backend {self.backend!r}: "
                f"{os.strerror(-handle)} ({len(self._owners)} registrations of this engine are open){cure}"
            )
        owner = owner if owner is not None else x
        self._owners[handle] = owner
        desc = MrDesc(
            self._addrs[group],
            ptr,
            nbytes,
            int(write),
            [keys[i].remote_key for i in range(nics)],
            [keys[i].remote_base for i in range(nics)],
        )
        return MrHandle(self, handle, ptr, nbytes, self.devices[group], group, owner), desc

    def dereg_mr(self, handle: MrHandle, timeout: float | None = None) -> None:
        """Deregister. New transfers are refused at once; those in flight are waited for (C7).

        Raises:
            StaleHandle: closed already, or of another engine. QueueFull: transfers still use it after `timeout`.
        """
        if not isinstance(handle, MrHandle):
            raise TypeError(f"dereg_mr() takes an MrHandle, not {type(handle).__name__}")
        if self._core.pid != os.getpid():
            self._check_open()
        if handle._engine is not self or handle.closed:
            raise StaleHandle(f"{handle!r} {'is closed already' if handle.closed else 'belongs to another engine'}")
        seconds = self.settings.timeout if timeout is None else timeout
        rc = lib.fab_mem_dereg(self._core.pointer, handle._handle, int(seconds * 1e9))
        if rc == -errno.EBUSY:
            raise QueueFull(f"{handle!r} is still the source of transfers after {seconds:g} s: cancel() them first")
        if rc == -errno.EBADF and not self._closed:
            raise StaleHandle(f"{handle!r} is being closed by another thread")
        self._owners.pop(handle._handle, None)
        handle._handle = 0
        handle.owner = None

    # ---- peers -----------------------------------------------------------------------------------------------------

    def add_peer_group(self, addrs: Iterable[NetAddr | str]) -> PeerGroup:
        """Return a group for scatter and barrier; each peer counts once, however often it is named."""
        if isinstance(addrs, str) or not isinstance(addrs, Iterable):
            raise TypeError(f"add_peer_group() takes several addresses, not {addrs!r}")
        group = PeerGroup(self._addr(a) for a in addrs)
        for addr in group.addrs:
            self._peer(0, addr)
        return group

    def _addr(self, addr: NetAddr | str) -> NetAddr:
        if isinstance(addr, str):
            addr = NetAddr.parse(addr)
        if not isinstance(addr, NetAddr):
            raise TypeError(f"expected a NetAddr or 'backend:address', not {type(addr).__name__}")
        if addr.backend != self.backend:
            raise ConfigError(
                f"{addr} is an address of backend {addr.backend!r}; this engine runs {self.backend!r}: "
                f"open it with backend={addr.backend!r}"
            )
        for domain in addr.domains:
            if not self._known_address(domain):
                raise ConfigError(f"{addr}: {domain!r} is no address of backend {self.backend!r}")
        return addr

    def _peer(self, group: int, addr: NetAddr) -> int:
        number = self._peers.get((group, addr))
        if number is None:
            self._check_open()
            addr = self._addr(addr)
            held = [ffi.new("char[]", d.encode("ascii")) for d in addr.domains]
            number = lib.fab_peer_add(self._core.pointer, group, len(held), held)
            if number < 0:
                raise QueueFull(f"{addr} cannot be added: {os.strerror(-number)} (an engine knows 65536 peers at most)")
            with self._lock:
                former = self._slots.get((group, number & _PEER_SLOT))
                if former not in (None, number):  # lost long ago, and forgotten for this one
                    self._peers.pop((group, self._names.pop((group, former))), None)
                self._slots[group, number & _PEER_SLOT] = number
                self._peers[group, addr] = number
                self._names[group, number] = addr
        return number

    def _peer_name(self, group: int, number: int) -> str | None:
        addr = self._names.get((group, number))
        return str(addr) if addr is not None else None

    def _nic_name(self, group: int, nic: int) -> str | None:
        return self._addrs[group].domains[nic] if 0 <= nic < len(self._addrs[group].domains) else None

    def _remote(self, desc: MrDesc, group: int) -> Remote:
        """Return a descriptor's form in C, made at its first use. Hold it while its handle is being submitted."""
        if not isinstance(desc, MrDesc):
            raise TypeError(f"expected the MrDesc of a peer, not {type(desc).__name__}")
        token = self._tokens[group]
        peer = self._peer(group, desc.addr)
        with self._lock:
            found: Remote | None = desc._remotes.get(token)
            if found is None:
                keys, bases = list(desc.keys), list(desc.bases)
                rc = lib.fab_remote_add(
                    self._core.pointer, group, peer, desc.nbytes, desc.access, len(keys), keys, bases
                )
                if rc == -errno.ESRCH:  # forgotten in this very moment
                    self._peers.clear()
                    raise QueueFull(f"{desc.addr} was just forgotten as a peer that is long lost; try again")
                if rc < 0:
                    raise QueueFull(f"{desc!r} cannot be added: {os.strerror(-rc)} (1048576 descriptors at most)")
                found = desc._remotes[token] = Remote(self._core, rc)
        return found

    def _group_of(self, device: str | None) -> int:
        if device is None:
            return 0
        try:
            return self.devices.index(device)
        except ValueError:
            raise ConfigError(f"this engine serves {', '.join(self.devices)}, not {device!r}") from None

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"{self.address} is closed")
        if self._core.pid != os.getpid():
            raise EngineClosed(
                f"this engine belongs to process {self._core.pid}; after a fork, open another one in the child"
            )


_engines: weakref.WeakSet[EngineBase] = weakref.WeakSet()


def _forget_after_fork() -> None:
    """In the child of a fork, whatever is called on the parent's engines is an error: their threads are not here."""
    for engine in list(_engines):
        engine._core.pointer, engine._core.address, engine._address = ffi.NULL, 0, 0


os.register_at_fork(after_in_child=_forget_after_fork)


@atexit.register
def _close_all() -> None:
    """At exit, close what the program left open, while Python can still run callbacks."""
    for engine in list(_engines):
        with contextlib.suppress(Exception):
            engine.close(1.0)
