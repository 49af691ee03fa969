"""What the scheduler half tells the worker halves at each step, and what they tell it. Plain data, to be pickled."""

from __future__ import annotations

from dataclasses import dataclass, field

from fabric_kvcache.vllm.params import Recv

__all__ = ["Advance", "Load", "Report", "Step"]

Blocks = tuple[list[int], ...]  #: of each KV cache group that moves


@dataclass(slots=True)
class Advance:
    """A prompt that is sent is computed from token `first` to `end` in this step."""

    request_id: str  #: vLLM's
    transfer_id: str
    blocks: Blocks  #: from token 0 on, as far as they are known
    first: int
    end: int
    total: int  #: tokens of the prompt
    moved: bool = False  #: it was preempted, and lies in other blocks than before


@dataclass(slots=True)
class Load:
    """A prompt is to be received."""

    request_id: str
    want: Recv
    blocks: Blocks
    start: int  #: tokens that are here already
    total: int


@dataclass(slots=True)
class Step:
    """Of one step, by vLLM's request ids.

    The blocks of what is held or dropped wait until the workers say that nothing is read from them any more.
    """

    advances: list[Advance] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)  #: their blocks are used by others from this step on
    held: dict[str, tuple[str, float]] = field(default_factory=dict)  #: finished: transfer id, seconds to be kept
    dropped: dict[str, tuple[str, str]] = field(default_factory=dict)  #: ended otherwise: transfer id, and why
    cancelled: set[str] = field(default_factory=set)
    unwanted: set[str] = field(default_factory=set)  #: of those held: nobody will ask for them, if nobody has
    idle: bool = False  #: nothing is computed in it


@dataclass(slots=True)
class Report:
    """Of one rank, and after `add` of all. Times are seconds."""

    received: dict[str, tuple[int, int, float]] = field(default_factory=dict)  #: id -> (bytes, writes, seconds)
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)  #: id -> (bytes, writes)
    reasons: dict[str, str] = field(default_factory=dict)  #: id -> why it could not be received
    unsafe: dict[str, int] = field(default_factory=dict)  #: id -> ranks where a write may still land in its blocks
    safe: dict[str, int] = field(default_factory=dict)  #: id -> ranks, of the above, where none can any more

    def __bool__(self) -> bool:
        return bool(self.received or self.sent or self.reasons or self.unsafe or self.safe)

    def add(self, other: Report) -> None:
        for key, (nbytes, writes, seconds) in other.received.items():
            a, b, c = self.received.get(key, (0, 0, 0.0))
            self.received[key] = (a + nbytes, b + writes, max(c, seconds))
        for key, (nbytes, writes) in other.sent.items():
            mine = self.sent.get(key, (0, 0))
            self.sent[key] = (mine[0] + nbytes, mine[1] + writes)
        for key, reason in other.reasons.items():
            self.reasons.setdefault(key, reason)
        for here, there in ((self.unsafe, other.unsafe), (self.safe, other.safe)):
            for key, count in there.items():
                here[key] = here.get(key, 0) + count
