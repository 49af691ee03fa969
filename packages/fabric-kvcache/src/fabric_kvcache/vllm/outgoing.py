"""What the prefill side knows of one prompt that it sends."""

from __future__ import annotations

from dataclasses import dataclass, field

from fabric_kvcache.job import PrefillJob
from fabric_kvcache.vllm.steps import Advance

__all__ = ["Outgoing"]


@dataclass(slots=True)
class Outgoing:
    """`ready` and `pushed` are granules: in the cache, and on their way."""

    request_id: str
    transfer_id: str
    total: int  #: tokens
    last: Advance
    ready: int = 0
    pushed: int = 0
    upto: int = 0  #: granules whose pages the job knows
    job: PrefillJob | None = None
    moved: bool = False  #: the blocks that the job knows are not its own any more
    error: str = ""  #: why it is not sent any more
    stopped: bool = False  #: the job was told so
    over: bool = False  #: nothing is read from its blocks any more, nor will be
    finished: bool = False  #: vLLM has finished it, and its blocks wait for us
    until: float = field(default=float("inf"))  #: how long they wait for a decoder that has not asked

    @classmethod
    def unknown(cls, request_id: str, transfer_id: str) -> Outgoing:
        """Of a request of which nothing was computed."""
        return cls(request_id, transfer_id, 1, Advance(request_id, transfer_id, (), 0, 0, 1))
