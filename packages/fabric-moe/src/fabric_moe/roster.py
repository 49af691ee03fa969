"""Meeting the other ranks on a board, and no leftovers of them: a card counts when its owner has read ours.

A job that was killed leaves its cards behind, and the next one may use the same board and name. So each card carries a
number that is drawn anew. A rank that has all cards publishes what it has read (a digest of those numbers); it goes on
when each other process has published the same. Nobody that is gone can have read a number that was drawn after.

A rank may go on, and leave, before another one has looked whether it has read all. So what it has read stays on the
board when its card is taken off: a digest, which tells nothing and fits no other meeting.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Sequence

from fabric_core import DeadlineExceeded, ProtocolError
from fabric_moe.meet import Board

__all__ = ["Roster", "gather", "process_id"]

_START = secrets.token_hex(8)
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.1  # seconds


def process_id() -> str:
    """Return what tells this process from others, its forks among them."""
    return f"{_START}-{os.getpid()}"


class Roster:
    """What one rank publishes and reads in one generation: its card, and the digest of all that it has read."""

    def __init__(self, board: Board, job: str, number: int, rank: int, members: Sequence[int]) -> None:
        self._board = board
        self._names = {r: f"{job}.g{number}.r{r}" for r in members}
        self._job, self._number = job, number
        self._rank = rank
        self._mine = process_id()
        self._said = ""
        self._done = False  #: whether all have met, as far as we know
        self._found: dict[int, tuple[str, str, str]] = {}  # rank -> (number drawn, process, card)
        self._met: set[str] = {self._mine}  #: processes that have read what we have read

    def publish(self, card: str) -> None:
        """Put our card on the board. Raises ConfigError, OSError."""
        if self._number >= 2:
            # that meeting is over for all who are in this one
            self._board.withdraw(f"{self._job}.g{self._number - 2}.r{self._rank}.met")
        self._board.publish(self._names[self._rank], f"{secrets.token_hex(8)} {self._mine} {card}")

    def withdraw(self) -> None:
        """Take our card off, and what we have read unless another rank may still wait for that."""
        self._board.withdraw(self._names[self._rank])
        if not self._done:
            self._board.withdraw(self._names[self._rank] + ".met")

    def look(self) -> dict[int, str] | None:
        """Return the cards of all members if all have met, else None; never waits. Raises ProtocolError."""
        for rank, name in self._names.items():
            known = self._found.get(rank)
            if known is None or known[1] not in self._met:  # it may be of an earlier run, and is replaced then
                text = self._peek(name)
                if text is None:  # not there yet; or it has met all and left, which it says below
                    continue
                parts = text.split(" ", 2)
                if len(parts) != 3:
                    raise ProtocolError(f"what lies under {name}, the name of rank {rank}, is no card: {text[:60]!r}")
                self._found[rank] = (parts[0], parts[1], parts[2])
        if len(self._found) < len(self._names):
            return None
        read = " ".join(self._found[r][0] for r in self._names)
        digest = hashlib.sha256(read.encode()).hexdigest()[:32]
        if digest != self._said:
            self._board.publish(self._names[self._rank] + ".met", digest)
            self._said, self._met = digest, {self._mine}
        for rank, (_, process, _) in self._found.items():
            if process not in self._met and self._peek(self._names[rank] + ".met") == digest:
                self._met.add(process)
        if any(process not in self._met for _, process, _ in self._found.values()):
            return None
        self._done = True
        return {rank: card for rank, (_, _, card) in self._found.items()}

    def missing(self) -> str:
        """Say who has not come, once the time is over."""
        absent = [name for rank, name in self._names.items() if rank not in self._found]
        if absent:
            return f"nobody published {', '.join(absent)}"
        late = [self._names[r] for r, (_, process, _) in self._found.items() if process not in self._met]
        return f"{', '.join(late)}: a card is there, but its rank has not read ours: left by an earlier run, or slow"

    def _peek(self, name: str) -> str | None:
        try:
            return self._board.lookup(name, 0.0)
        except DeadlineExceeded:
            return None


def gather(rosters: Sequence[Roster], timeout: float) -> list[dict[int, str]]:
    """Wait until all ranks of each roster have met, in whatever order others look; return the cards by rank.

    Raises DeadlineExceeded with the names of those that did not come, ProtocolError for what is no card.
    """
    deadline = time.monotonic() + timeout
    found: list[dict[int, str] | None] = [None] * len(rosters)
    pause = _FIRST_PAUSE
    while True:
        for i, roster in enumerate(rosters):
            if found[i] is None:
                found[i] = roster.look()
        done = [cards for cards in found if cards is not None]
        if len(done) == len(found):
            return done
        left = deadline - time.monotonic()
        if left <= 0:
            words = "; ".join(roster.missing() for roster, cards in zip(rosters, found, strict=True) if cards is None)
            raise DeadlineExceeded(f"within {timeout:g} s {words}", op="lookup", code="ETIME")
        time.sleep(min(pause, left))  # the others may be on another machine: there is nothing to be woken by
        pause = min(pause * 2, _LAST_PAUSE)
