"""What a NIC backend is: THE page to read before writing one.

A backend is an object with a name, found through the entry point group `fabric.backends`:

    [project.entry-points."fabric.backends"]
    mynic = "fabric_mynic:backend"

It answers two questions: which devices are there (`probe`), and open those that belong to one GPU (`open_group`).
What it opens are *domains*: one per NIC, each driven by the engine. There are two ways to give one:

- `NativeDomain`: the address of a `fab_domain_ops` table and a context pointer, for a backend written in C
  (`fabric/domain.h`; `fabric_core.get_include()` says where it is). Costs nothing per operation.
- a subclass of `Domain`: the same table as Python methods, which core adapts. About 100 lines to begin with; each
  completion then costs a microsecond or so, and up to 5 ms while another Python thread holds the GIL.

Order. None is promised and none is assumed: neither of deliveries, nor of completions (C2). One promise is made: an
immediate is reported only when the payload of its write is in memory (C10).

Errors. A method reports failure by raising `OSError(errno.X, text)`; the engine passes the number on. The numbers it
understands are listed in `fabric_core.errors.CODES`. Any other exception is logged with its traceback, reported to
`engine.on_error`, and counts as EIO: user code cannot hurt the engine (C9).

The conformance kit checks all of this: `pytest --pyargs fabric_core.conformance --fabric-backend NAME`.

This module imports the standard library only: `import fabric_core` must stay cheap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any, Protocol, runtime_checkable

__all__ = [
    "API_VERSION",
    "MAX_NICS",
    "PEER_NONE",
    "Access",
    "Backend",
    "Completion",
    "CompletionKind",
    "DeviceInfo",
    "DeviceKind",
    "Domain",
    "DomainCaps",
    "GroupConfig",
    "Memory",
    "MrKeys",
    "NativeDomain",
    "Unavailable",
    "WorkKind",
    "WorkRequest",
]

#: Version of the contract on this page. The registry refuses a backend built for another one, naming both.
API_VERSION = 1

#: Domains of one group at most: the split's denominator has three bits on the wire.
MAX_NICS = 8

#: `Completion.peer` when the NIC cannot tell who sent a message.
PEER_NONE = 0xFFFFFFFF


# ---- what there is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A NIC that can be opened now."""

    name: str  #: what the user types, e.g. "mlx5_0"
    backend: str
    state: str = "up"  #: "up", or what the driver says: "down", "armed", ...
    rate_gbit_s: float | None = None  #: decimal gigabits per second of the link; None: unknown or not limited by one
    numa: int | None = None
    pci: str | None = None  #: "0000:3b:00.0"
    mtu: int | None = None  #: bytes
    caps: tuple[str, ...] = ()  #: e.g. "imm", "gpu-direct", "relaxed"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A device or a whole backend that cannot be used, and why: never drop one silently."""

    name: str
    reason: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """What to open: the NICs that serve one device."""

    device: str  #: "cpu", "cpu:1", "cuda:0"
    name: str  #: base of the addresses where the backend has names (local: "NAME.0", "NAME.1", ...)
    nics: int | None = None  #: how many domains; None: all that belong to the device
    settings: Any = None  #: `fabric_core.config.Settings`; Any, so that this page needs no pydantic
    numa: int | None = None  #: the NUMA node of the device, where buffers and threads should be


# ---- memory ----------------------------------------------------------------------------------------------------------


class Access(IntFlag):
    """What a registration may be used for."""

    LOCAL = 0  #: source of our own writes
    REMOTE_WRITE = 1  #: peers that hold the descriptor may write


class DeviceKind(IntEnum):
    """Where registered memory lives."""

    HOST = 0
    CUDA = 1


@dataclass(frozen=True, slots=True)
class Memory:
    """A range to register. It stays valid, and stays at its address, until `mr_dereg` returned."""

    addr: int
    length: int  #: bytes
    access: int = Access.LOCAL
    fd: int = -1  #: shareable memory: a descriptor that a peer on this host may map; -1: none. Not owned: dup() it
    fd_offset: int = 0  #: where `addr` lies in it
    device_kind: int = DeviceKind.HOST
    device_id: int = -1


@dataclass(frozen=True, slots=True)
class MrKeys:
    """How a registration is named in work requests."""

    local_key: int  #: comes back as `WorkRequest.local_key` here
    remote_key: int  #: travels in the descriptor, comes back as `WorkRequest.remote_key` at the peer
    remote_base: int  #: remote address of the first byte: the virtual address, or 0 where the NIC takes offsets


@dataclass(frozen=True, slots=True)
class DomainCaps:
    """Limits of one domain. The engine splits and checks; a backend never sees a request beyond them."""

    max_write: int = 0  #: bytes of one write; 0: no limit
    max_send: int = 65536  #: bytes of one message
    bandwidth: int = 0  #: bytes per second of the link; 0: unknown
    numa: int | None = None


# ---- work and completions --------------------------------------------------------------------------------------------


class WorkKind(IntEnum):
    """What a work request asks for."""

    WRITE = 1
    SEND = 2


@dataclass(slots=True)
class WorkRequest:
    """One write or message. Read it during `post` only: the engine may reuse the object afterwards."""

    id: int  #: comes back in the completion; several requests may share one
    kind: int  #: WorkKind
    length: int  #: bytes; 0 is valid for a write that carries an immediate
    local_addr: int
    local_key: int  #: 0 for a SEND: a backend that needs registered memory there copies the message
    remote_addr: int = 0  #: remote_base + offset
    remote_key: int = 0
    imm: int | None = None  #: 32 bits to raise at the receiver; None: silent


class CompletionKind(IntEnum):
    """What a completion reports."""

    OP = 1  #: `count` requests of `id` ended with `status`
    IMM = 2  #: `imm` arrived `count` times; the payload is visible
    RECV = 3  #: the receive `id` holds `length` bytes from `peer`
    PEER_UP = 4  #: the peer of `peer_open` can be posted to
    PEER_DOWN = 5  #: `peer` is lost, for the reason in `status`
    NIC_DOWN = 6  #: this domain cannot be posted to: see `Domain.poll`
    FAULT = 7  #: something was refused on the receiving side; counted, and told to `engine.on_error`
    NIC_UP = 8  #: after NIC_DOWN: it can be posted to again; paths to peers are opened anew


@dataclass(slots=True)
class Completion:
    """One event out of `poll`."""

    kind: int  #: CompletionKind
    id: int = 0
    length: int = 0
    status: int = 0  #: 0, or a negative errno
    imm: int = 0
    peer: int = PEER_NONE
    count: int = 1  #: >= 1 for OP and IMM


# ---- the two forms of a domain ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NativeDomain:
    """A domain written in C: two addresses, and whatever must stay alive while the engine holds them.

    The engine checks `abi_version` and `struct_size` of the table, and owns the context from then on: it calls the
    table's `close` exactly once.
    """

    ops: int  #: address of a `const fab_domain_ops`
    ctx: int  #: first argument of each of its functions
    keepalive: object = field(default=None, repr=False, compare=False)


class Domain(ABC):
    """One NIC, in Python.

    Threads. `peer_open`, `peer_close`, `post`, `post_recv`, `poll`, `cancel` and `arm` are called with the group's lock
    held: never two at a time for the domains of one group, but from changing threads. `mr_reg`, `mr_dereg` and
    `address` may be called from any thread at any time. `close` is the last call. No method may block: what cannot be
    done now is reported as such.
    """

    @abstractmethod
    def caps(self) -> DomainCaps:
        """Return the limits of this domain. Asked once, before anything else."""

    @abstractmethod
    def address(self) -> str:
        """Return where peers reach this domain: printable, without commas and blanks, at most 255 bytes.

        It holds whatever tells this incarnation from an earlier one under the same name.
        """

    @abstractmethod
    def mr_reg(self, memory: Memory) -> MrKeys:
        """Register a range. Raises ENOMEM (limits), EFAULT (no such memory), EOPNOTSUPP (kind of memory)."""

    @abstractmethod
    def mr_dereg(self, local_key: int) -> None:
        """Revoke a registration: no write of a peer may land in the range once this returned.

        Later requests that name its remote key end with EKEYREVOKED at the sender.
        """

    @abstractmethod
    def peer_open(self, addr: str) -> int:
        """Begin first contact with `addr` and return a peer number at once.

        Exactly one PEER_UP or PEER_DOWN follows through `poll`, in bounded time (`settings.connect_timeout`). After UP,
        DOWN follows when the peer is lost, whether or not anything is in flight (`settings.heartbeat`). With ENETDOWN,
        ETIMEDOUT, EHOSTUNREACH or ENETUNREACH it is this path that is lost, and the engine goes on over its other NICs;
        any other status says that the peer itself is gone. After DOWN the number is dead: the engine closes it, and
        opens the address again if it wants to.
        """

    @abstractmethod
    def peer_close(self, peer: int) -> None:
        """Forget a peer. Requests still in flight to it end with ECANCELED, or as they would have."""

    @abstractmethod
    def post(self, peer: int, writes: Sequence[WorkRequest]) -> int:
        """Hand over a prefix of `writes`, all for `peer`, and return how many were taken.

        0 means full: the engine tries again after `poll`. Each request that was taken ends exactly once through `poll`
        (C1), also when the peer is lost; until then the NIC may read its local range (C7). An OSError, or a negative
        errno returned, refuses the first request: it fails alone, nothing of the rest was taken.
        """

    @abstractmethod
    def post_recv(self, id: int, addr: int, length: int) -> bool:
        """Offer a receive buffer, consumed by one message. False: no more fit now. The NIC owns it until RECV."""

    @abstractmethod
    def poll(self, max: int, now_ns: int) -> list[Completion]:
        """Make progress and return up to `max` completions.

        `now_ns` is the time as the caller knows it, monotonic, in nanoseconds: use it for every timeout, never a clock,
        so that the simulator can turn the hands.

        After NIC_DOWN it goes on being called: requests that the NIC holds still end (once `peer_close` was called at
        the latest), posted receives come back as RECV with -ENETDOWN, and NIC_UP may follow. An exception says that
        nothing of this can be expected any more: the domain is closed at once, what it held ends with ENETDOWN.
        """

    @abstractmethod
    def cancel(self, id: int) -> None:
        """Make every request of `id` that is in flight end soon, with ECANCELED or as it would have."""

    def wait_fd(self) -> int:
        """Return a descriptor that becomes readable while armed and something happens; -1: must be polled."""
        return -1

    def arm(self, on: bool) -> bool:
        """Ask for wake-ups through `wait_fd`, or no longer. Returns True if there is something to poll already."""
        return on  # without a descriptor nobody may sleep

    def counters(self) -> dict[str, int]:
        """Return what this domain has refused since it was opened, by kind; from any thread. See docs/backend.md."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """End everything: no NIC touches registered memory after this returned. Called once, last."""


# ---- the backend -----------------------------------------------------------------------------------------------------


@runtime_checkable
class Backend(Protocol):
    """What the entry point names: an object, or a module with these names.

    Optional: `known_address(domain: str) -> bool`, whether text can be an address of this backend, so that a misspelt
    one is refused at once. Optional: `variables`, a dict from each environment variable that the backend reads itself
    (`FABRIC_MYNIC_...`) to one sentence of help: `fabric env` prints them, and `fabric doctor` calls a `FABRIC_*`
    variable that nobody declares a misspelling. Optional: `checks() -> Iterable[dict[str, str]]`, what `fabric doctor`
    should say about this machine: keys name, status (OK, WARN, FAIL, SKIP), found, and if useful wanted and cure.
    Optional: `words(nic: str, peer: str, status: int) -> str`, what its library said of an error (negative errno) of
    one of our NICs (its address) with a peer (all its addresses, or ""), or "": the text of the exception has it.
    Optional: `one_process = True`, if engines of other processes cannot be reached: the conformance kit then leaves out
    what needs one.
    """

    name: str
    api_version: int  #: the API_VERSION it was written for

    def probe(self) -> list[DeviceInfo | Unavailable]:
        """Tell which devices there are, cheaply and without side effects; never raises for what is missing.

        A library that cannot be loaded, a device without permission: each is an `Unavailable` with its cure.
        """
        ...

    def open_group(self, config: GroupConfig) -> list[NativeDomain | Domain]:
        """Open the NICs that serve `config.device`, 1 to MAX_NICS of them.

        Raises BackendError (it broke), Unsupported (this device cannot be served) or ConfigError (`nics`, settings),
        and leaves nothing open in that case.
        """
        ...
