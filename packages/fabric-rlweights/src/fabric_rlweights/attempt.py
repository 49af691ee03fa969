"""What is known of an update under way, or of why it failed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fabric_rlweights.members import Member
from fabric_rlweights.protocol import Offer, Ready, Received, Sent

__all__ = ["Attempt", "NotCommitted", "differs"]


class NotCommitted(Exception):
    """Why an update fails, and by whom."""

    def __init__(self, reason: str, culprits: Iterable[str]) -> None:
        super().__init__(reason)
        self.culprits = sorted(set(culprits))


@dataclass
class Attempt:
    """An update under way, or a late receiver that gets the current version (`seeding`), and what was heard for it."""

    number: int
    version: int
    begin: float
    deadline: float
    members: list[Member] = field(default_factory=list)
    offers: dict[int, Offer] = field(default_factory=dict)
    ready: dict[int, Ready] = field(default_factory=dict)
    sent: dict[int, Sent] = field(default_factory=dict)
    received: dict[int, Received] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    seeding: bool = False

    def side(self, role: str) -> list[Member]:
        """The members of a role."""
        return [m for m in self.members if m.who[0] == role]


def differs(update: Attempt, offer: Offer) -> NotCommitted:
    """Return why an update fails for which trainers push different versions."""
    text = f"trainer {offer.rank} offers version {offer.version} while others offer {update.version}"
    return NotCommitted(text, [f"trainer {offer.rank}"])
