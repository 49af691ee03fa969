"""What ranks of a stream say to each other."""

from __future__ import annotations

import msgspec

__all__ = ["Card", "Failed", "Taken"]


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the others must know of a rank."""

    address: str
    desc: bytes
    imms: list[int]  #: one for each slot
    size: int  #: bytes of data of a bucket


class Taken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="t"):
    """Receiver -> sender: this bucket was used, and all before it; its slot is free."""

    session: int
    receiver: int
    bucket: int


class Failed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="f"):
    """Anybody -> all: there is no use in waiting."""

    session: int
    reason: str
