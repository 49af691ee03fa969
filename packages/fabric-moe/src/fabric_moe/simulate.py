"""`fabric moe simulate`: what a step costs on a cluster, by the cost models of `fabric_core.sim_predict`.

The times of the wire are the real engine's, under virtual time, over NICs with a cost model: a scatter of the counts,
one of the rows. What a GPU does before and after is not modelled; it is an input, stated with the answer (`Kernels`).

    dispatch   launch -> first bytes ready -> counts and rows, posted by one worker -> last row there -> receive kernel
    combine    the same without counts

Three ways to send are compared: a copy for each expert (the paper's), once for each rank (`MoeGroup`), once for each
node, with the rest over NVLink (`NodeGroup`, which tells its counts to its own rail only: as many peers as nodes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fabric_core import ConfigError
from fabric_core.cli.models import Model
from fabric_core.sim_predict import compare, nics, predict
from fabric_moe.nodes import rail_config
from fabric_moe.presets import preset

__all__ = ["KERNELS", "PUBLISHED", "Answer", "Check", "Kernels", "Way", "simulate", "table_checks"]

Way = Literal["expert", "rank", "node"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """What GPUs add to the wire, in microseconds."""

    name: str
    first: float  #: from the launch of dispatch to its first bytes being ready to be sent
    dispatch_recv: float  #: from the last row's arrival to the end of dispatch
    combine_first: float  #: from the launch of combine to its first bytes being ready
    combine_recv: float
    source: str


#: `paper`: section 6 and Fig. 12 of arXiv 2510.27656. `asked`: what this project asks of its kernels. `h200`: what its
#: kernels took on an H200, docs/results: whole kernels, since what they send leaves when they end.
KERNELS = {
    "paper": Kernels("paper", 15.0, 25.3, 13.4, 15.0, "first transfer 15 us after launch; kernel times of Fig. 12"),
    "asked": Kernels(
        "asked", 4.0, 8.0, 4.0, 7.0,
        "3 us + 1.5 x the bytes of 128 tokens at 3.3 TB/s: what this project asks of its kernels",
    ),
    "h200": Kernels("h200", 8.3, 7.4, 14.1, 6.0, "this package's kernels, 128 tokens, 8 ranks on an H200; no proxy"),
}  # fmt: skip

#: p50 microseconds, as the paper's authors publish them: (kind, NIC, ranks) -> (dispatch, combine). Left out: two
#: cells of the prefill table that look exchanged with each other.
PUBLISHED: dict[tuple[str, str, int], tuple[float, float]] = {
    ("decode", "efa-p5en", 16): (214.8, 241.5),
    ("decode", "efa-p5en", 32): (229.1, 335.0),
    ("decode", "efa-p5en", 64): (266.7, 391.2),
    ("decode", "cx7", 16): (110.2, 185.5),
    ("decode", "cx7", 32): (153.9, 266.3),
    ("decode", "cx7", 64): (187.5, 309.1),
    ("prefill", "efa-p5en", 16): (3196.7, 5379.1),
    ("prefill", "efa-p5en", 32): (4619.0, 8271.5),
    ("prefill", "efa-p5en", 64): (5334.3, 9779.3),
    ("prefill", "cx7", 32): (4011.8, 7526.8),
    ("prefill", "cx7", 64): (4665.2, 8771.1),
}


class Answer(Model):
    """One shape on one NIC, sent one way."""

    nic: str
    ranks: int
    tokens: int
    way: str
    kernels: str
    dispatch_us: float
    combine_us: float
    wire_dispatch_us: float  #: of them, from the first bytes being ready to the last row's arrival
    wire_combine_us: float
    dispatch_bytes: int  #: that leave the node, of one rank
    combine_bytes: int
    least_dispatch_us: float  #: those bytes at the NIC's nominal rate
    least_combine_us: float
    nvlink_us: float  #: of both halves together: same-node rows, and forwarding; overlaps with the wire
    published_dispatch_us: float | None
    published_combine_us: float | None


class Check(Model):
    """A figure of the paper's Tables 8 and 9 (posting) beside the prediction."""

    nic: str
    what: str
    paper_us: float
    predicted_us: float
    off_percent: float


def table_checks() -> list[Check]:
    """Return the paper's times of posting a scatter, beside those that the predictor has."""
    found = []
    for row in compare():
        if row.what.startswith("scatter") and row.paper is not None and row.deviation is not None:
            found.append(
                Check(
                    nic=row.nic,
                    what=row.what,
                    paper_us=row.paper,
                    predicted_us=row.predicted,
                    off_percent=row.deviation,
                )
            )
    return found


def targets(experts: int, held: Sequence[int], topk: int) -> float:
    """Distinct groups (ranks, nodes) of a token whose experts are drawn evenly; held: experts of each group."""
    found = 0.0
    for n in held:
        miss = 1.0
        for j in range(min(topk, experts)):
            miss *= max(0, experts - n - j) / (experts - j)
        found += 1 - miss
    return found


def _scatter(nic: str, size: int, peers: int) -> tuple[float, float]:
    """Return seconds from submit to the last arrival, and the worker's time in it that a next scatter waits for."""
    if peers < 1 or size < 1:
        return 0.0, 0.0
    latency = _costs(nic)["latency_ns"] / 1e9
    found = predict(nic, "scatter", size=size, peers=peers)
    return max(0.0, found.seconds - latency), found.posting_s


def simulate(
    nic: str, ranks: int, *, shape: str = "decode", way: Way = "rank", kernels: Kernels | None = None,
    node: int = 8, tokens: int | None = None, nvlink_gb_s: float = 450.0,
) -> Answer:  # fmt: skip
    """Predict a step of `ranks` ranks, `node` of them in a node.

    Raises ConfigError for a NIC or shape that is none, for a node that is not full, and for nodes without experts.
    """
    if ranks > node and ranks % node:
        raise ConfigError(f"ranks={ranks}: a multiple of the {node} ranks of a node, or one node (--node)")
    base = preset(shape)
    config = base.config(ranks, **({} if tokens is None else {"max_tokens": tokens}))
    kernels = kernels or KERNELS["paper"]
    t, k, e = config.max_tokens, config.topk, config.experts
    payload = config.token_bytes + config.scale_bytes
    row = payload if way == "expert" else config.row_bytes  # the copies of the paper carry no list of experts
    back = config.hidden * 2
    nodes = max(1, ranks // node)
    to_ranks = targets(e, np.diff(config.expert_bounds).tolist(), k)
    remote = ranks - min(ranks, node)
    if way == "expert":
        away = t * k * remote / ranks
        inside = t * k - away
        peers = remote
    elif way == "rank":
        each = t * to_ranks
        away = each * remote / ranks
        inside = each - away
        peers = remote
    else:
        if nodes > 1:
            row = rail_config(config, node).row_bytes
        each = t * targets(e, np.diff(config.expert_bounds[::node]).tolist(), k) if nodes > 1 else 0
        away = each * (nodes - 1) / nodes
        inside = t * to_ranks
        peers = nodes - 1
    counts = 64 + -(-4 * (nodes if way == "node" else ranks) // 64) * 64
    heard = peers if way == "node" else remote
    count_s, count_post = _scatter(nic, counts, heard)
    rows_out = away / peers if peers else 0
    rows_s, _ = _scatter(nic, round(rows_out * row), peers)
    back_s, _ = _scatter(nic, round(rows_out * back), peers)
    private = min(rows_out, config.private_max)
    dispatch = count_post + rows_s
    if rows_out > private:  # what is beyond waits for the counts of all ranks
        late_s, _ = _scatter(nic, round((rows_out - private) * row), peers)
        early_s, _ = _scatter(nic, round(private * row), peers)
        wire_rest = max(early_s + count_post, count_s)
        dispatch = max(dispatch, wire_rest + late_s - _costs(nic)["latency_ns"] / 1e9)
    nvlink = inside * (row + back) / (nvlink_gb_s * 1e9)
    local = inside * row / (nvlink_gb_s * 1e9), inside * back / (nvlink_gb_s * 1e9)
    if not peers:
        dispatch, back_s = local
    elif way == "node":
        # Rows are forwarded as they come, sums gathered before they leave: only the tail of one peer's share adds.
        dispatch += local[0] / peers
        back_s += local[1] / peers
    rate = _rate(nic)
    published = PUBLISHED.get((shape, nic, ranks)) if tokens is None else None
    return Answer(
        nic=nic, ranks=ranks, tokens=t, way=way, kernels=kernels.name,
        dispatch_us=kernels.first + dispatch * 1e6 + kernels.dispatch_recv,
        combine_us=kernels.combine_first + back_s * 1e6 + kernels.combine_recv,
        wire_dispatch_us=dispatch * 1e6, wire_combine_us=back_s * 1e6,
        dispatch_bytes=round(away * row + counts * heard), combine_bytes=round(away * back),
        least_dispatch_us=away * row / rate * 1e6, least_combine_us=away * back / rate * 1e6,
        nvlink_us=nvlink * 1e6,
        published_dispatch_us=published[0] if published else None,
        published_combine_us=published[1] if published else None,
    )  # fmt: skip


def _costs(nic: str) -> dict[str, int]:
    known = {found.name: found.costs for found in nics() if found.name != "none"}
    if nic not in known:
        raise ConfigError(f"no NIC is called {nic!r}; there are {', '.join(known)}")
    return known[nic]


def _rate(nic: str) -> float:
    """Bytes in a second that the NICs of a GPU carry by their name."""
    costs = _costs(nic)
    return costs["nics"] * costs["gbps"] * 1e9 / 8
