"""What an instance of prefill or decode says of itself, and the simplest way to know of it: a fixed list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Protocol

import msgspec

from fabric_core import ConfigError, FabricError, NetAddr

__all__ = ["BEATS", "Directory", "Member", "Role", "State", "StaticDirectory"]

Role = Literal["prefiller", "decoder"]
State = Literal["serving", "draining"]
BEATS = 4  #: of a heart in a lease

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance says of itself."""

    name: _Name  #: one live instance at a time has it
    role: Role
    addresses: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=1024)]  #: of all its ranks' engines
    incarnation: Annotated[str, msgspec.Meta(max_length=32)] = ""
    state: State = "serving"  #: draining: finishes what it has, takes nothing new
    load: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0  #: requests in hand, by its own account
    layout: Annotated[str, msgspec.Meta(max_length=128)] = ""  #: of its cache, in the user's words; only to compare
    lease_ms: Annotated[int, msgspec.Meta(ge=1, le=86_400_000)] = 3000
    beat: Annotated[int, msgspec.Meta(ge=-1)] = -1  #: counts its heart's beats; -1: it has none, and never expires

    def __post_init__(self) -> None:
        for address in self.addresses:
            NetAddr.parse(address)


class Directory(Protocol):
    """What a `Registry` reads."""

    def read(self) -> list[Member]:
        """Return every record, dead ones too. Raises FabricError if that cannot be told now."""
        ...

    def forget(self, member: Member) -> None:
        """Drop the record of somebody who is gone for long, unless it has changed meanwhile."""
        ...


class StaticDirectory:
    """A fixed list."""

    def __init__(self, members: Iterable[Member]) -> None:
        self.members = list(members)
        names = [member.name for member in self.members]
        if len(set(names)) != len(names):
            raise ConfigError(f"{', '.join(names)}: each member needs a name of its own")

    @classmethod
    def parse(cls, text: str) -> StaticDirectory:
        """Read "prefiller=local:p0 decoder=local:d0": ROLE=ADDRESS, or ROLE=ADDRESS+ADDRESS for several ranks.

        Raises ConfigError.
        """
        members: list[Member] = []
        for word in text.split():
            role, equal, addresses = word.partition("=")
            if role not in {"prefiller", "decoder"} or not equal:
                raise ConfigError(f"{word!r}: a member is prefiller=ADDRESS or decoder=ADDRESS")
            try:
                member = Member(
                    name=f"{role}{sum(m.role == role for m in members)}",
                    role="prefiller" if role == "prefiller" else "decoder",
                    addresses=tuple(addresses.split("+")),
                )
            except FabricError as error:
                raise ConfigError(f"{word!r}: {error}") from None
            members.append(member)
        return cls(members)

    def read(self) -> list[Member]:
        return list(self.members)

    def forget(self, member: Member) -> None:
        pass
