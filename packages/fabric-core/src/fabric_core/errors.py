"""Every error that fabric raises, and what to do about it.

    FabricError
    ├── ConfigError (ValueError)              a setting has a value that makes no sense
    ├── BadRange (ValueError)                 a request does not fit into its memory region
    ├── StaleHandle (ValueError)              a handle or descriptor that is closed, or of another engine
    ├── ProtocolError (ValueError)            bytes that are not what they claim to be
    ├── Unsupported                           the backend, or this machine, cannot do that
    ├── BackendError                          a backend could not start, or broke down
    ├── EngineClosed                          the engine was closed before, or meanwhile
    ├── QueueFull                             backpressure lasted longer than `submit_timeout`
    ├── WaitTimeout (TimeoutError)            wait() gave up; the operation itself goes on
    └── TransferError                         an operation ended badly: .peer .nic .op .code .writes
        ├── DeadlineExceeded (TimeoutError)   its own timeout passed
        ├── PeerLost (ConnectionError)        nobody answers, or the peer is gone
        │   └── PeerRestarted                 another process answers at that address now
        ├── NicLost (ConnectionError)         a NIC of ours, or one path to a peer, is lost; the others go on
        ├── RemoteAccessError                 the peer's side refused the memory access
        └── Cancelled                         ended by cancel() or by close()

An error is raised, or logged, once: where it is first known. Its text says what failed, with which peer, over which
NIC, in which operation, and what to do. `CODES` holds the same help for `fabric explain`.

Imports the standard library only, and is safe to use from any thread.
"""

from __future__ import annotations

import errno
from typing import NamedTuple

__all__ = [
    "CODES",
    "BackendError",
    "BadRange",
    "Cancelled",
    "Code",
    "ConfigError",
    "DeadlineExceeded",
    "EngineClosed",
    "FabricError",
    "NicLost",
    "PeerLost",
    "PeerRestarted",
    "ProtocolError",
    "QueueFull",
    "RemoteAccessError",
    "StaleHandle",
    "TransferError",
    "Unsupported",
    "WaitTimeout",
    "code_name",
    "transfer_error",
]


class FabricError(Exception):
    """The root: `except FabricError` catches everything that fabric raises on purpose."""


class ConfigError(FabricError, ValueError):
    """A setting is wrong. The text names the variable, its value, where it came from, and what is allowed."""


class BadRange(FabricError, ValueError):
    """A request does not fit its memory region. Raised at submit: a bad request never reaches a NIC (C6)."""


class StaleHandle(FabricError, ValueError):
    """A handle, descriptor or immediate that is closed, freed, or belongs to another engine."""


class ProtocolError(FabricError, ValueError):
    """Bytes fed to a decoder (a descriptor, an address, a handshake) are not a valid message (C12)."""


class Unsupported(FabricError):
    """The backend or the machine cannot do what was asked; nothing was started."""


class BackendError(FabricError):
    """A backend could not be found, opened, or broke one of its promises."""


class EngineClosed(FabricError):
    """The engine was closed before the call, or while it waited."""


class QueueFull(FabricError):
    """The engine took no more work for `submit_timeout` seconds: the NIC or the peer does not keep up (C8)."""


class WaitTimeout(FabricError, TimeoutError):
    """wait() gave up. The operation is still pending: wait again, or cancel() it."""


class TransferError(FabricError):
    """An operation ended badly. `str()` reads: operation, peer, NIC, reason, code, what to do.

    Only the reason is positional, so that the exception survives pickling between processes.
    """

    def __init__(
        self,
        reason: str = "",
        *,
        peer: str | None = None,
        nic: str | None = None,
        op: str | None = None,
        code: str | None = None,
        cure: str | None = None,
        writes: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.peer = peer  #: address of the peer, as `str(NetAddr)` shows it
        self.nic = nic  #: the local domain the operation went through
        self.op = op  #: "write", "paged_writes", "scatter", "barrier", "send", "recv", "expect"
        self.code = code  #: errno name, e.g. "ECONNRESET"
        self.cure = cure  #: what the user can do
        #: of a transfer: how many of its writes had ended well, and of how many. The others may have arrived or not;
        #: none of them arrives later (C7)
        self.writes = writes

    def __str__(self) -> str:
        known = CODES.get(self.code or "")
        reason = self.reason or (known.meaning if known else "failed")
        cure = self.cure or (known.cure if known else "")
        where = self.op or ""
        if self.peer:
            where += f" to {self.peer}" if where else f"peer {self.peer}"
        if self.nic:
            where += f" over {self.nic}" if where else f"NIC {self.nic}"
        text = f"{where}: {reason}" if where else reason
        if self.code and self.code not in reason:
            text += f" [{self.code}]"
        if self.writes and self.writes[1] > 1:
            text += f"; {self.writes[0]} of its {self.writes[1]} writes had ended well"
        return f"{text}; {cure}" if cure else text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class DeadlineExceeded(TransferError, TimeoutError):
    """The timeout given to the operation passed; the engine ended it and no NIC touches its memory any more (C7)."""


class PeerLost(TransferError, ConnectionError):
    """The peer does not answer, died, or closed; everything in flight to it ended with this (C11)."""


class NicLost(TransferError, ConnectionError):
    """A NIC of ours, or the path over it to a peer, is lost. The other NICs of the group go on: submit it again."""


class PeerRestarted(PeerLost):
    """The peer's address is served by a new incarnation; old descriptors are void: exchange new ones."""


class RemoteAccessError(TransferError):
    """The peer's side refused the access: no such registration, no right to write, or another user's process."""


class Cancelled(TransferError):
    """Ended by cancel(), or by close() of the engine."""


class Code(NamedTuple):
    """Help for one status code: what it means here, usual causes, what to do."""

    meaning: str
    causes: str
    cure: str


#: errno name -> help. The first block is the table of `fabric/domain.h`, the second what set-up runs into.
CODES: dict[str, Code] = {
    "ECONNREFUSED": Code(
        "nobody answers at this address",
        "the peer has not started, runs on another host or under another user, or its name is misspelt",
        "start the peer first, or compare the address with what it prints as `engine.address`",
    ),
    "ECONNRESET": Code(
        "the peer is gone",
        "its process died or closed its engine",
        "look into the peer's log; open a new exchange of descriptors when it is back",
    ),
    "ESTALE": Code(
        "another incarnation answers at this address",
        "the peer was restarted under the same name",
        "exchange descriptors and addresses again with the new process",
    ),
    "ETIMEDOUT": Code(
        "the peer did not answer in time, or stopped moving",
        "it is overloaded, stopped in a debugger, or the link between the two is down",
        "check the peer with `fabric ping`; raise FABRIC_CONNECT_TIMEOUT or FABRIC_HEARTBEAT if it is only slow",
    ),
    "ETIME": Code(
        "the operation's own timeout passed",
        "the peer or the NIC is slower than the timeout allows, or an immediate was never sent",
        "raise timeout= (or FABRIC_TIMEOUT) if the transfer is only slow; else look for the sender that is missing",
    ),
    "EACCES": Code(
        "it refused us: the secrets differ (FABRIC_SECRET), or it runs under another uid, or the memory is read-only",
        "a secret on one side only or two different ones, another uid, or memory registered without the right to write",
        "give both sides the same FABRIC_SECRET_FILE (`fabric doctor` says whether one is set), run both as one user, "
        "and register the target with write=True",
    ),
    "EKEYREJECTED": Code(
        "a handshake with another process was refused: it does not hold our secret",
        "FABRIC_SECRET or FABRIC_SECRET_FILE is set on one side only or differs, or a stranger tries to get in",
        "compare the settings of both sides (`fabric doctor`); `engine.stats()['refused']['auth']` counts them all",
    ),
    "EUSERS": Code(
        "the peer, or this process, has as many links as it takes",
        "more than 4096 NIC pairs, links that are opened and never closed, or somebody who floods the peer",
        "close engines that are no longer needed, use fewer NICs per group; see `engine.stats()['refused']`",
    ),
    "EPROTO": Code(
        "the peer speaks another version of the protocol",
        "the two sides run different releases of fabric-core",
        "install the same version on both sides; `fabric version` prints it",
    ),
    "EFAULT": Code(
        "the memory at the peer is not reachable",
        "it was freed or unmapped while still registered",
        "keep the buffer alive until its handle is closed",
    ),
    "EMSGSIZE": Code(
        "the message is longer than the posted receive",
        "submit_recvs() was given a smaller length than the sender uses",
        "post larger receives, or send less",
    ),
    "EKEYREVOKED": Code(
        "that registration no longer exists at the peer",
        "the owner closed its handle, and the sender kept the descriptor",
        "send a fresh descriptor after every registration",
    ),
    "ENETDOWN": Code(
        "the NIC is gone",
        "a link or device failure, or the driver was reset",
        "submit it again: where the group has more NICs, they go on; look at `fabric devices` and at the kernel's log",
    ),
    "EHOSTUNREACH": Code(
        "no path to the peer over this NIC",
        "a cable, a switch or a route between the two is down",
        "submit it again: where the group has more NICs, they go on; look at the link's state at both ends",
    ),
    "ENETUNREACH": Code(
        "no path to the peer's network over this NIC",
        "the two NICs are on networks that do not meet, or a route is missing",
        "look at `fabric topo` and at the routes of both hosts",
    ),
    "ECANCELED": Code(
        "ended by cancel() or close()",
        "somebody asked for it",
        "nothing: wait for transfers before closing the engine if they matter",
    ),
    "ENOMEM": Code(
        "not enough memory, or not enough lockable memory",
        "RLIMIT_MEMLOCK is lower than what is being registered, or /dev/shm is full",
        "raise the limit (`ulimit -l unlimited`), see `fabric doctor`",
    ),
    "EPERM": Code(
        "not permitted",
        "ptrace scope or a container's seccomp profile forbids process_vm_writev, or a device node is closed to us",
        "see `fabric doctor`; set FABRIC_LOCAL_PATH=bounce, or use engine.empty() memory, which needs no permission",
    ),
    "ENODEV": Code(
        "no such device",
        "the backend finds no NIC of that name",
        "see `fabric devices` for what there is and why the rest is not usable",
    ),
    "EAGAIN": Code(
        "full for the moment",
        "a queue or the ring is at its bound",
        "wait for completions and try again; raise FABRIC_MAX_INFLIGHT if it is the bound that hurts",
    ),
    "EINVAL": Code(
        "the request makes no sense to the NIC",
        "a bad length, alignment or flag, or a defect in the backend",
        "run the backend's conformance kit: `fabric plugins --check NAME`",
    ),
    "EPROTONOSUPPORT": Code(
        "the peer's address is of another transport than this engine",
        "the two sides chose different providers or backends",
        "choose the same on both sides: see `fabric plugins` and `fabric devices`",
    ),
    "EIO": Code(
        "the NIC or the backend failed in an unnamed way",
        "a hardware error, or an exception in a backend written in Python",
        "look into the log of this process: the backend's own message is there",
    ),
    "ENOSPC": Code(
        "no room",
        "/dev/shm or a table of the NIC is full",
        "free some registrations, or enlarge /dev/shm",
    ),
    "EOPNOTSUPP": Code(
        "the NIC cannot do that",
        "the capability is missing from this device",
        "see the CAPS column of `fabric devices`",
    ),
}

_CLASS: dict[str, type[TransferError]] = {
    "ECONNREFUSED": PeerLost,
    "ECONNRESET": PeerLost,
    "ETIMEDOUT": PeerLost,  # the peer's silence, told by the backend; the engine's own timeout is ETIME
    "ESTALE": PeerRestarted,
    "ENETDOWN": NicLost,
    "EHOSTUNREACH": NicLost,
    "ENETUNREACH": NicLost,
    "ETIME": DeadlineExceeded,
    "EACCES": RemoteAccessError,
    "EFAULT": RemoteAccessError,
    "EKEYREVOKED": RemoteAccessError,
    "ECANCELED": Cancelled,
}


def code_name(status: int) -> str:
    """Return the errno name of a status (its sign does not matter): -104 -> "ECONNRESET"; "E9999" if unknown."""
    number = abs(status)
    if number == errno.EOPNOTSUPP:  # on Linux ENOTSUP has the same number, and errorcode knows only one of the two
        return "EOPNOTSUPP"
    return errno.errorcode.get(number, f"E{number}")


def transfer_error(
    status: int,
    *,
    op: str | None = None,
    peer: str | None = None,
    nic: str | None = None,
    reason: str = "",
    cure: str | None = None,
    writes: tuple[int, int] | None = None,
) -> TransferError:
    """Turn a status of the engine or of a backend (a negative errno) into the exception of its class.

    Without `reason` and `cure` the texts of `CODES` are used. Not raised here: the caller decides when.
    """
    code = code_name(status)
    kind = _CLASS.get(code, TransferError)
    return kind(reason, peer=peer, nic=nic, op=op, code=code, cure=cure, writes=writes)
