"""The life of one step: dispatch sent, received, combine sent, done."""

from __future__ import annotations

import threading
from typing import Any

from fabric_core import Expectation
from fabric_moe.errors import StepError
from fabric_moe.generation import Generation
from fabric_moe.routing import Places, Route

__all__ = ["DONE", "RECEIVED", "RETURNED", "SENT", "Step"]

SENT = "its dispatch was sent"
RECEIVED = "its dispatch was received"
RETURNED = "its combine was sent"
DONE = "done"


class Step:
    """What `dispatch_send` returns, and the other three halves take. Belongs to one group."""

    def __init__(self, number: int, slot: int, generation: Generation, route: Route, torch: bool) -> None:
        self.number = number  #: counted from 1 in each generation
        self.slot = slot
        self.generation = generation
        self.route = route
        self.torch = torch  #: whether the tokens were a torch tensor, so that the result is one too
        self.state = SENT
        self.lock = threading.Lock()  #: of what the receiving thread and, without C, the callback thread may both do
        self.error: Exception | None = None  #: what went wrong in the second phase
        self.counts: Expectation | None = None
        self.places: Places | None = None  #: known when the counts of all ranks are here
        self.credit: Expectation | None = None
        self.turn: dict[int, int] = {}  #: destination -> the turn of its shared memory that we wait for
        self.received: Any = None

    @property
    def unreachable(self) -> int:
        """How many of the given expert ids were left out because the ranks of those experts are masked."""
        return self.route.unreachable

    def failed(self) -> Exception | None:
        """Return what went wrong with it on another thread."""
        proxy = self.generation.proxy
        return self.error or (None if proxy is None else proxy.failed(self.slot))

    def owes_rows(self) -> bool:
        """Return whether tokens have not left: there was no room for them yet where they go to."""
        proxy = self.generation.proxy
        return bool(self.turn) if proxy is None else proxy.owes(self.slot)

    def must_be(self, state: str, call: str) -> None:
        """Raise StepError if the step is not in the state that a call needs."""
        if self.state != state:
            raise StepError(f"{call}: step {self.number} is not ready for it: {self.state}; wanted is: {state}")

    def __repr__(self) -> str:
        return f"<Step {self.number}: {self.state}>"
