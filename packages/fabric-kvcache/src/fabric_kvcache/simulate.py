"""What a KV transfer would add to the first token on a cluster: prefill's compute times, and the core's model of NICs.

Nothing is measured here. A chunk's layers finish one after the other, as long apart as they compute; each layer's
writes go out when it is finished and the ones before it are through; the tail follows the last layer. How long a
layer's writes take says `fabric_core.sim_predict`: the real engine under virtual time, over NICs that cost time.

What this leaves out: the memory and PCIe of either side, other traffic, and the engine of either side's own step from
the KV to its next token (the paper's overhead is mostly that: one extra decode pass).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from fabric_core import ConfigError
from fabric_core.cli.models import Model
from fabric_core.sim_predict import predict
from fabric_kvcache.cache import CacheLayout, StateGroup
from fabric_kvcache.plan import Chunk, make_plan
from fabric_kvcache.presets import Preset
from fabric_kvcache.shard import Shard

__all__ = ["KvSimulation", "SimulatedRow", "busiest_layer", "simulate"]

_REQUEST_BYTES = 256  # beside the tokens and the page numbers, four bytes each
_MAX_PAIRS = 1 << 12


class SimulatedRow(Model):
    """A prompt of one length. Times are microseconds of virtual time unless they say ms."""

    tokens: int
    chunks: int
    compute_us: list[float]  #: of a layer, by chunk
    compute_origin: str
    layer_writes: list[int]  #: of the busiest pair of NIC groups, for a layer, by chunk
    write_bytes: int
    transfer_us: list[float]  #: of a layer, by chunk
    request_us: float
    tail_us: float
    posted_us: float  #: from "layer ready" to "posted", as given
    exposed_us: float  #: from the end of the last layer's compute until everything is there
    ttft_ms: float  #: prefill alone
    overhead_percent: float  #: (request + exposed) / ttft
    afterwards_percent: float  #: the same if nothing were sent before prefill has ended
    bound: str  #: what bounds a layer's transfer in the last chunk
    hidden: bool  #: whether every chunk's layer is transferred faster than it is computed
    paper_overhead_percent: float | None
    paper_transfer_us: float | None


class KvSimulation(Model):
    """The data of schema fabric.kv.simulate/1."""

    preset: str
    source: str
    destination: str
    nic: str
    shared: int  #: ranks of a side that share one GPU's NICs
    limit_percent: float
    rows: list[SimulatedRow]
    good: bool  #: every row's overhead is below the limit


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """The most that one group of NICs has to carry for a layer of a chunk."""

    writes: int
    nbytes: int


def busiest_layer(src: CacheLayout, dst: CacheLayout, chunk: Chunk, *, shared: int = 1, seed: int = 0) -> Layer:
    """Count every rank's writes for every layer, out and in; return the layer and rank that have the most.

    `shared` neighbouring ranks of a side share their NICs. Raises LayoutMismatch; ConfigError for too many ranks.
    """
    if src.tp * src.pp * dst.tp * dst.pp > _MAX_PAIRS:
        raise ConfigError(
            f"{src.tp * src.pp * dst.tp * dst.pp} pairs of ranks: at most {_MAX_PAIRS} are simulated; try smaller tp"
        )
    ends: dict[tuple[str, int, int], list[int]] = defaultdict(lambda: [0, 0])
    for a in _ranks(src, chunk.total):
        for b in _ranks(dst, chunk.total):
            plan = make_plan(a, b, seed=seed)
            for job in plan.jobs:
                alone = dataclasses.replace(plan, jobs=(job,))
                writes, nbytes = (total // len(job.layers) for total in (alone.writes(chunk), alone.nbytes(chunk)))
                for layer in job.layers:
                    for end in (("out", (a.pp * src.tp + a.tp) // shared), ("in", (b.pp * dst.tp + b.tp) // shared)):
                        total = ends[(*end, layer)]
                        total[0] += writes
                        total[1] += nbytes
    return Layer(*max(ends.values(), key=lambda both: (both[1], both[0])))


def _ranks(layout: CacheLayout, tokens: int) -> Iterable[Shard]:
    pages = tuple(1 if isinstance(group, StateGroup) else -(-tokens // group.page_tokens) for group in layout.groups)
    return [Shard(layout, tp=tp, pp=pp, pages=pages) for pp in range(layout.pp) for tp in range(layout.tp)]


def simulate(
    preset: Preset,
    dst: CacheLayout,
    tokens: Iterable[int],
    *,
    nic: str = "efa-p5en",
    chunk_tokens: int = 0,
    shared: int = 1,
    posted_us: float = 10.0,
    limit_percent: float = 1.9,
) -> KvSimulation:
    """Simulate prompts of these lengths. Raises ConfigError, LayoutMismatch."""
    rows = [
        _row(preset, dst, count, nic=nic, chunk_tokens=chunk_tokens, shared=shared, posted_us=posted_us)
        for count in tokens
    ]
    return KvSimulation(
        preset=preset.name,
        source=_show(preset.layout),
        destination=_show(dst),
        nic=nic,
        shared=shared,
        limit_percent=limit_percent,
        rows=rows,
        good=all(row.overhead_percent < limit_percent for row in rows),
    )


def _show(layout: CacheLayout) -> str:
    return f"TP {layout.tp}, PP {layout.pp}: {'; '.join(str(group) for group in layout.groups)}"


def _row(
    preset: Preset, dst: CacheLayout, tokens: int, *, nic: str, chunk_tokens: int, shared: int, posted_us: float
) -> SimulatedRow:
    chunks = preset.chunks(tokens, chunk_tokens)
    compute = preset.compute_us(tokens, chunk_tokens)
    # Chunks of one length cost the same: ask once for each.
    known: dict[int, tuple[Layer, float, str]] = {}
    for chunk in chunks:
        length = chunk.end - chunk.first
        if length not in known:
            layer = busiest_layer(preset.layout, dst, chunk, shared=shared)
            size = -(-layer.nbytes // layer.writes)
            found = predict(nic, "pages", size=size, pages=layer.writes, count=4)
            known[length] = layer, 1e6 * found.seconds, found.bound
    costs = [known[chunk.end - chunk.first] for chunk in chunks]
    layers = preset.layout.total_layers
    tail_us = 1e6 * predict(nic, "write", size=preset.tail_bytes, count=4).seconds
    pages = sum(-(-tokens // group.page_tokens) for group in dst.groups if not isinstance(group, StateGroup))
    request_us = 1e6 * predict(nic, "write", size=4 * (tokens + pages) + _REQUEST_BYTES, count=4).seconds
    ready = free = 0.0  # microseconds since the first layer began: the model, and the NICs
    for each, (_layer, transfer, _bound) in zip(compute, costs, strict=True):
        for _ in range(layers):
            ready += each
            free = max(free, ready + posted_us) + transfer
    done = max(free, ready + posted_us) + tail_us
    all_us = layers * sum(transfer for _layer, transfer, _bound in costs)
    row = preset.paper.get(tokens)
    return SimulatedRow(
        tokens=tokens,
        chunks=len(chunks),
        compute_us=compute,
        compute_origin=preset.origin(tokens, chunk_tokens),
        layer_writes=[layer.writes for layer, _transfer, _bound in costs],
        write_bytes=-(-costs[-1][0].nbytes // costs[-1][0].writes),
        transfer_us=[transfer for _layer, transfer, _bound in costs],
        request_us=request_us,
        tail_us=tail_us,
        posted_us=posted_us,
        exposed_us=done - ready,
        ttft_ms=ready / 1e3,
        overhead_percent=100 * (request_us + done - ready) / ready,
        afterwards_percent=100 * (request_us + posted_us + all_us + tail_us) / ready,
        bound=costs[-1][2],
        hidden=all(transfer <= each for each, (_layer, transfer, _bound) in zip(compute, costs, strict=True)),
        paper_overhead_percent=None if row is None else row.overhead_percent,
        paper_transfer_us=None if row is None else row.transfer_us,
    )
