"""What the demo measures, as models: the two roles send them to their parent, `fabric demo kv --json` prints them.

Names carry their units. Times of one process are differences of its own clock; nothing compares two clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from fabric_core.cli.models import Model
from fabric_kvcache.job import TAIL, Push

__all__ = [
    "Error",
    "Failed",
    "Halfway",
    "Killed",
    "KvDemo",
    "KvFleet",
    "Layer",
    "ModelFacts",
    "Prefilled",
    "Ready",
    "Result",
    "Task",
    "Text",
    "measure",
]

Span = tuple[float, float]


class ModelFacts(Model):
    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    threads: int  #: of torch, the same in both processes


class Layer(Model):
    layer: int
    compute_us: float  #: attention and MLP, without the push
    push_us: float  #: the computing thread's own share of the transfer: copying into source pages, and submit
    transfer_us: float  #: from submit until the write has ended at the prefiller
    bytes: int


class Prefilled(Model):
    """What one request looked like at the prefiller."""

    event: Literal["prefilled"] = "prefilled"
    request_id: str
    tokens: int
    chunk_tokens: int
    layers: list[Layer]
    writes: int
    bytes: int
    prefill_us: float  #: the whole forward pass, pushes included
    tail_us: float  #: the tail's transfer
    transfer_us: float  #: time in which at least one write was under way
    hidden_us: float  #: that part of it in which the model was computing
    overlap: float  #: hidden_us / transfer_us
    gbyte_s: float  #: bytes / transfer_us
    gbit_s: float


class Ready(Model):
    event: Literal["ready"] = "ready"
    role: Literal["prefiller", "decoder"]
    pid: int
    address: str
    load_us: float


class Task(Model):
    """What the parent tells the decoder when both are ready. The prompt comes this way: `ps` shows arguments."""

    prefiller: str  #: its address
    prompt: str
    retry: bool = False  #: if the prefiller fails: say so, and wait for another task


class Halfway(Model):
    """A prefiller that was told to hold has pushed half of its layers, and goes no further."""

    event: Literal["halfway"] = "halfway"
    request_id: str
    layers: int  #: that were pushed
    of: int


class Failed(Model):
    """A prefiller did not do it, and the decoder waits for another task."""

    event: Literal["failed"] = "failed"
    request_id: str
    prefiller: str
    message: str


class Text(Model):
    """A piece of text, as it was generated."""

    event: Literal["text"] = "text"
    way: Literal["two", "one"]  #: processes
    text: str


class Result(Model):
    """What the decoder saw of one request, and the comparison."""

    event: Literal["result"] = "result"
    request_id: str
    model: ModelFacts
    backend: str
    nics: int
    prompt: str
    prompt_tokens: int
    chunk_tokens: int
    page_tokens: int
    pages: int  #: of each layer
    page_bytes: int
    writes: int  #: immediates that were waited for: pages x layers + 1
    bytes: int
    ttft_us: float  #: from the request to the first token
    import_us: float  #: from pages to the model's own cache
    decode_us: float  #: of the tokens after the first
    tokens: list[int]
    text: str
    compared: bool
    asked: list[str]  #: prefillers, in turn; the last one did it
    one_ttft_us: float | None = None  #: the same in one process: from the start of prefill to the first token
    one_tokens: list[int] | None = None
    one_text: str | None = None
    kv_equal: bool | None = None  #: every byte of keys and values
    logits_equal: bool | None = None


class Error(Model):
    """The last event of a role that failed."""

    event: Literal["error"] = "error"
    role: Literal["prefiller", "decoder"]
    code: int
    message: str


class Killed(Model):
    """The prefiller that was killed in the middle of a request."""

    name: str
    address: str
    pid: int
    request_id: str
    layers: int  #: that it had pushed
    of: int


class KvFleet(Model):
    """The data of schema fabric.demo.kv.fleet/1."""

    equal: bool  #: every decoder's text, tokens, KV bytes and first logits, and the killed one's request was retried
    decoders: list[Result]
    prefillers: list[Prefilled]  #: what the survivor did, in its order
    killed: Killed
    failures: list[Failed]  #: as the decoders saw them


class KvDemo(Model):
    """The data of schema fabric.demo.kv/1."""

    equal: bool  #: text, tokens, KV bytes and first logits
    decoder: Result
    prefiller: Prefilled


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same time as disjoint spans, in order."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def common(a: Sequence[Span], b: Sequence[Span]) -> float:
    """Return the length of what two lists of disjoint spans share."""
    return sum(max(0.0, min(x[1], y[1]) - max(x[0], y[0])) for x in a for y in b)


def measure(
    request_id: str,
    pushes: Sequence[Push],
    spans: Sequence[tuple[int, float, float]],
    prefill: Span,
    *,
    tokens: int,
    chunk: int,
) -> Prefilled:
    """Turn the time stamps of a prefill into figures.

    A transfer is hidden while the model computes: inside the forward pass, and not while its thread copies or submits.
    `spans`: (layer, began, ended) of every layer in every chunk, pushes included.
    """
    busy = union((push.submitting, push.done) for push in pushes)
    stolen = union((push.began, push.submitted) for push in pushes)
    inside = [(max(start, prefill[0]), min(end, prefill[1])) for start, end in busy if start < prefill[1]]
    transfer = length(busy)
    hidden = length(inside) - common(inside, stolen)
    layers = []
    for number in sorted({push.layer for push in pushes} - {TAIL}):
        own = [push for push in pushes if push.layer == number]
        push_s = sum(push.submitted - push.began for push in own)
        layers.append(
            Layer(
                layer=number,
                compute_us=1e6 * (sum(end - start for layer, start, end in spans if layer == number) - push_s),
                push_us=1e6 * push_s,
                transfer_us=1e6 * sum(push.done - push.submitting for push in own),
                bytes=sum(push.nbytes for push in own),
            )
        )
    nbytes = sum(push.nbytes for push in pushes)
    return Prefilled(
        request_id=request_id,
        tokens=tokens,
        chunk_tokens=chunk,
        layers=layers,
        writes=sum(push.writes for push in pushes),
        bytes=nbytes,
        prefill_us=1e6 * (prefill[1] - prefill[0]),
        tail_us=1e6 * sum(push.done - push.submitting for push in pushes if push.layer == TAIL),
        transfer_us=1e6 * transfer,
        hidden_us=1e6 * hidden,
        overlap=hidden / transfer if transfer else 0.0,
        gbyte_s=nbytes / transfer / 1e9 if transfer else 0.0,
        gbit_s=8 * nbytes / transfer / 1e9 if transfer else 0.0,
    )
