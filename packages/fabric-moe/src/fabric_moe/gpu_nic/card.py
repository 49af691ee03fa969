"""What a rank on a GPU tells the others about itself where tokens travel through the engine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from fabric_core import FabricError, MrDesc, NetAddr, ProtocolError
from fabric_moe.config import MoeConfig
from fabric_moe.gpu_nic.proxy import KINDS

__all__ = ["Card"]

VERSION = 1
_KIND = "cuda through the engine"
_IMMS = 1 << 29  # an immediate of the engine is below


@dataclass(frozen=True, slots=True)
class Card:
    """Where a rank is, what the others may write, and its immediates."""

    rank: int
    members: tuple[int, ...]
    address: NetAddr
    control: MrDesc  #: host memory, for counts
    data: MrDesc  #: GPU memory, for rows and sums
    imms: list[list[int]]  #: [slot][kind]

    def text(self, config: MoeConfig) -> str:
        """Return the card as one printable line."""
        return json.dumps(
            {
                "version": VERSION,
                "kind": _KIND,
                "rank": self.rank,
                "members": list(self.members),
                "address": str(self.address),
                "control": self.control.to_bytes().hex(),
                "data": self.data.to_bytes().hex(),
                "imms": self.imms,
                "shape": asdict(config),
            },
            separators=(",", ":"),
        )

    @classmethod
    def read(cls, text: str, config: MoeConfig, rank: int, members: tuple[int, ...]) -> Card:
        """Read the card of `rank`. Raises ProtocolError for anything that is not one, or does not fit ours."""
        try:
            found = json.loads(text)
            if (kind := found.get("kind", "host memory")) != _KIND:
                raise ProtocolError(
                    f"rank {rank} was opened for {kind!r}, this rank for {_KIND!r}: give the same device= and through= "
                    "on all ranks"
                )
            if found["version"] != VERSION:
                raise ProtocolError(
                    f"rank {rank} speaks version {found['version']!r} of the protocol, this side {VERSION}: "
                    "install the same fabric-moe on all"
                )
            shape = found["shape"]
            if words := config.differences(shape if isinstance(shape, dict) else {}):
                raise ProtocolError(f"rank {rank} was opened with another shape: {words}")
            if found["rank"] != rank:
                raise ProtocolError(f"the card under the name of rank {rank} is that of rank {found['rank']}")
            if tuple(found["members"]) != members:
                raise ProtocolError(
                    f"rank {rank} makes a group of ranks {found['members']}, this rank of {list(members)}: "
                    "mask the same ranks everywhere"
                )
            imms = [[int(imm) for imm in row] for row in found["imms"]]
            card = cls(
                rank, members, NetAddr.parse(found["address"]), MrDesc.from_bytes(bytes.fromhex(found["control"])),
                MrDesc.from_bytes(bytes.fromhex(found["data"])), imms,
            )  # fmt: skip
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, FabricError):
                raise
            raise ProtocolError(f"what lies under the name of rank {rank} is no card: {error!r}") from None
        if len(imms) != config.depth or any(len(row) != KINDS for row in imms):
            raise ProtocolError(f"the card of rank {rank} is cut off")
        if any(not 0 <= imm < _IMMS for row in imms for imm in row):
            raise ProtocolError(f"the card of rank {rank} names an immediate that is none")
        return card
