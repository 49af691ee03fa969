"""What `fabric kv bench` prints, as models. Names carry their units; times of both processes are of one clock."""

from __future__ import annotations

from fabric_core.cli.models import Model

__all__ = ["KvBench", "KvBenchRow"]


class KvBenchRow(Model):
    """A prompt of one length with one pair of layouts. Medians over the rounds; wrong bytes are added up."""

    name: str  #: of the preset or file
    memory: str
    tokens: int
    chunk_tokens: int
    chunks: int
    layers: int
    model_layers: int  #: of the model, all of them
    source_ranks: int  #: that write into the one destination rank
    writes: int  #: per request, the tail included
    write_bytes: int  #: the most common length of a write
    bytes: int
    plan_us: float  #: for each chunk, all source ranks together
    # as fast as it goes
    burst_us: float  #: from the first submit until the receiver has seen all immediates
    gbyte_s: float
    limit: str
    limit_gbyte_s: float | None
    limit_percent: float | None
    sender_cpu_us_per_write: float  #: of the process: all threads, copying included
    receiver_cpu_us_per_write: float
    # while layers compute
    compute_us: list[float]  #: of a layer, by chunk
    compute_origin: str
    ready: str  #: who submits: a hook ("busy": in a thread that computes), the engine's watcher, a thread that polls
    posted_p50_us: float  #: from "layer ready" until its last submit has returned
    posted_p99_us: float
    late_p50_us: float  #: of hooks, against the clock
    exposed_us: float  #: from "last layer ready" until the receiver has seen all immediates, the tail's included
    overhead_percent: float  #: exposed / compute of the layers that were run
    overhead_model_percent: float  #: exposed / compute of all the model's layers
    wrong_bytes: int | None  #: None: not compared
    surplus: int  #: immediates that came too often


class KvBench(Model):
    """The data of schema fabric.kv.bench/1."""

    machine: dict[str, str]
    backend: str
    nics: int
    peer_nics: int
    parameters: dict[str, str]
    submit_to_post: dict[str, float]  #: the engine's own histogram over all runs (upper edges of its buckets)
    rows: list[KvBenchRow]
    verdict: str
