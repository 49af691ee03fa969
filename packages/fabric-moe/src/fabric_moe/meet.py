"""How the ranks of a group find each other: each puts a card on a board, and reads those of the others.

A board is what `fabric_core.bootstrap` opens (a shared folder, a TCPStore), or a `Table`, for ranks of one process. A
card holds a descriptor, so a board must be readable only by the job.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from fabric_core import DeadlineExceeded, MrDesc, NetAddr, ProtocolError
from fabric_moe.config import MoeConfig

__all__ = ["Board", "Card", "Table"]

VERSION = 1


class Board(Protocol):
    """Where cards are put: `fabric_core.bootstrap.open_board()`, or a Table."""

    def publish(self, name: str, value: str) -> None:
        """Put a value under a name."""
        ...

    def lookup(self, name: str, timeout: float) -> str:
        """Return the value under a name, waiting for it. Raises DeadlineExceeded."""
        ...

    def withdraw(self, name: str) -> None:
        """Take a name off."""
        ...


class Table:
    """A board for ranks that live in one process. Safe to use from any number of threads."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def publish(self, name: str, value: str) -> None:
        """See Board."""
        with self._changed:
            self._values[name] = value
            self._changed.notify_all()

    def lookup(self, name: str, timeout: float) -> str:
        """See Board."""
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._values, timeout):
                raise DeadlineExceeded(
                    f"nobody published {name} on the table within {timeout:g} s", op="lookup", code="ETIME"
                )
            return self._values[name]

    def withdraw(self, name: str) -> None:
        """See Board."""
        with self._changed:
            self._values.pop(name, None)


@dataclass(frozen=True, slots=True)
class Card:
    """What a rank tells the others about itself in one generation."""

    rank: int
    members: tuple[int, ...]
    address: NetAddr
    desc: MrDesc
    imms: tuple[tuple[int, ...], ...]  #: [slot][kind], see generation.py
    shape: Mapping[str, Any]

    def text(self, config: MoeConfig) -> str:
        """Return the card as one printable line."""
        return json.dumps(
            {
                "version": VERSION,
                "rank": self.rank,
                "members": list(self.members),
                "address": str(self.address),
                "desc": self.desc.to_bytes().hex(),
                "imms": [list(row) for row in self.imms],
                "shape": asdict(config),
            },
            separators=(",", ":"),
        )

    @classmethod
    def read(cls, text: str, config: MoeConfig, rank: int, kinds: int) -> Card:
        """Read the card of `rank`. Raises ProtocolError for anything that is not one, or of another shape."""
        try:
            found = json.loads(text)
            if found["version"] != VERSION:
                raise ProtocolError(
                    f"rank {rank} speaks version {found['version']!r} of the protocol, this side {VERSION}: "
                    "install the same fabric-moe on all"
                )
            shape = found["shape"]
            if not isinstance(shape, dict):
                raise TypeError("a shape is an object")
            if words := config.differences(shape):
                raise ProtocolError(f"rank {rank} was opened with another shape: {words}")
            imms = tuple(tuple(int(imm) for imm in row) for row in found["imms"])
            card = cls(
                int(found["rank"]),
                tuple(int(m) for m in found["members"]),
                NetAddr.parse(found["address"]),
                MrDesc.from_bytes(bytes.fromhex(found["desc"])),
                imms,
                shape,
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, ProtocolError):
                raise
            raise ProtocolError(f"what lies under the name of rank {rank} is no card: {error!r}") from None
        if card.rank != rank or len(imms) != config.depth or any(len(row) != kinds for row in imms):
            raise ProtocolError(f"the card under the name of rank {rank} is that of rank {card.rank}, or cut off")
        if any(not 0 <= imm < 1 << 32 for row in imms for imm in row):
            raise ProtocolError(f"the card of rank {rank} names an immediate that is none")
        return card
