"""What the three roles say to each other: small structs, in messages of bounded size that may be cut into parts.

    trainer, receiver -> controller   Hello, Here, Offer, Ready, Sent, Received, Quiet, Committed, Resumed, Leave
    controller -> trainer             Assign, Go, Abort, Result, Call, Stop
    controller -> receiver            Assign, Begin, Commit, Resume, Abort, Result, Seed, Call, Stop

`attempt` numbers updates as the controller counts them: an answer to an earlier one is not heard. Each controller
begins with the time of day, so that the numbers of two of them under one name differ, and the later one's are larger.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fabric_core import ProtocolError
from fabric_rlweights.route import Packed

__all__ = [
    "Abort",
    "Assign",
    "Begin",
    "Call",
    "Commit",
    "Committed",
    "Go",
    "Hello",
    "Here",
    "Leave",
    "Message",
    "Offer",
    "Quiet",
    "Ready",
    "Received",
    "Result",
    "Resume",
    "Resumed",
    "Seed",
    "Sent",
    "Stop",
    "decode",
    "encode",
]

VERSION = 3
MAX_BYTES = 1 << 30  #: of a message, all its parts together
Role = Literal["trainer", "receiver"]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
_Blob = Annotated[bytes, msgspec.Meta(max_length=8192)]
_Text = Annotated[str, msgspec.Meta(max_length=4000)]
_Imm = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """I am here, and this is my table (compressed JSON)."""

    role: Role
    rank: _Rank
    addr: _Blob
    table: bytes
    version: int = -1  #: a receiver's: of the weights that it serves, -1: none that it would tell


class Assign(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The plan as far as it is yours. A trainer gets a route; a receiver what belongs into its tensors."""

    plan: int  #: counts the controller's plans
    columns: dict[str, Packed]
    staging: dict[int, tuple[int, str]]  #: tensor that we make -> (bytes, class)
    names: list[str]  #: a receiver's tensors, by their numbers
    expected: int  #: a receiver's: how often its immediate is raised
    peers: list[_Blob]  #: a receiver's: addresses of the trainers that write to it


class Here(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The plan is taken up; or why it cannot be."""

    role: Role
    rank: _Rank
    plan: int
    problem: _Text = ""


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A trainer: my weights of this version are ready."""

    rank: _Rank
    version: int
    seconds: _Seconds  #: until its deadline
    plan: int  #: that its route is of
    imm: _Imm  #: for magnitudes
    desc: _Blob
    arrived: float = 0.0  #: by the clock of whoever receives it, who notes it here: `seconds` count from then on


class Begin(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """To a receiver: an update comes; make room."""

    attempt: int
    version: int
    seconds: _Seconds
    digests: bool
    fence: bool  #: memory must be registered anew: somebody who did not answer may still write to the old one
    expected: int = -1  #: other than the plan says: a late one is written to by a receiver
    peer: _Blob = b""  #: that one


class Ready(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A receiver can be written to: its tensors' descriptors by number; or it refuses."""

    attempt: int
    rank: _Rank
    imm: _Imm
    descs: dict[int, _Blob]
    problem: _Text = ""


class Go(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """To a trainer: write."""

    attempt: int
    version: int
    seconds: _Seconds
    digests: bool
    tensors: dict[int, dict[int, _Blob]]
    imms: dict[int, _Imm]
    trainers: dict[int, tuple[_Blob, _Imm]]
    addrs: dict[int, _Blob]


class Sent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A trainer's writes have all ended; well, if there is no problem."""

    attempt: int
    rank: _Rank
    problem: _Text
    culprit: _Text
    digests: dict[int, dict[int, int]]
    bytes: int


class Received(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A receiver has counted every write; or why not."""

    attempt: int
    rank: _Rank
    problem: _Text
    culprit: _Text
    digests: dict[int, int]


class Commit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """To a receiver: everybody has everything. Stop serving what was, and make it what is served next."""

    attempt: int
    version: int


class Committed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A receiver has it, paused; or why its engine could not."""

    attempt: int
    rank: _Rank
    problem: _Text


class Resume(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """To a receiver: nobody serves what was any more. Serve it."""

    attempt: int


class Resumed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A receiver serves it; or why its engine could not."""

    attempt: int
    rank: _Rank
    problem: _Text


class Call(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """To somebody who was taken for lost: say hello once more."""


class Stop(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """To a receiver: serve nothing but this version, unless you heard of a later attempt. To anybody: you are out."""

    attempt: int
    version: int
    reason: _Text
    replaced: bool  #: another one says that it is this rank: take part no more


class Leave(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """I go, and shall not come back."""

    role: Role
    rank: _Rank
    addr: _Blob


class Abort(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The update is not committed. Stop writing; do not serve what was written."""

    attempt: int
    version: int
    reason: _Text


class Quiet(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Nothing of that update is under way any more, on this rank."""

    role: Role
    attempt: int
    rank: _Rank
    version: int = -1  #: that a receiver goes on serving


class Result(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """How an update ended."""

    version: int
    committed: bool
    culprits: list[_Text]
    reason: _Text
    seconds: float


class Seed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """To a receiver: write your weights, all of them, to a peer that is late. Its tensors are like yours."""

    attempt: int
    rank: _Rank  #: of the late one
    version: int
    seconds: _Seconds
    imm: _Imm
    descs: dict[int, _Blob]
    digests: bool


Message = (
    Hello
    | Assign
    | Here
    | Offer
    | Begin
    | Ready
    | Go
    | Sent
    | Received
    | Commit
    | Committed
    | Resume
    | Resumed
    | Call
    | Stop
    | Leave
    | Abort
    | Quiet
    | Result
    | Seed
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Return the message in these bytes. Raises ProtocolError, and nothing else, for anything that is not one."""
    try:
        message: Message = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a malformed message: {error}") from None
    return message
