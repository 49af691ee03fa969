"""`fabric moe simulate`: what a step costs on a cluster, by the cost models of `fabric_core.sim_predict`.

The times of the wire are the real engine's, under virtual time, over NICs with a cost model: a scatter of the counts,
one of the rows. What a GPU does before and after is not modelled; it is an input, stated with the answer (`Kernels`).

    dispatch   launch -> first bytes ready -> counts and rows, posted by one worker -> last row there -> receive kernel
    combine    the same without counts

Three ways to send are compared: a copy for each expert (the paper's), once for each rank (`MoeGroup`), once for each
node, with the rest over NVLink (`NodeGroup`, which tells its counts to its own rail only: as many peers as nodes).

Once per node, a rank passes rows on to its node, and gathers sums from it:

    in flow    as they come, a share at a time: what the wire has not hidden is the share of one node, and a hop
    whole      after all of a step has come, as NodeGroup's calls do: all shares, and a hop

Who is met is drawn evenly, or by a gate that is limited to some groups of experts (gate.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from fabric_core import ConfigError
from fabric_core.cli.models import Model
from fabric_core.sim_predict import compare, nics, predict
from fabric_moe.gate import Limit, draw, met
from fabric_moe.nodes import rail_config
from fabric_moe.presets import preset
from fabric_moe.simulate_inputs import HOP, KERNELS, PUBLISHED, Kernels

__all__ = ["HOP", "KERNELS", "PUBLISHED", "Answer", "Check", "Kernels", "Way", "simulate", "table_checks"]

Way = Literal["expert", "rank", "node"]


_DRAWS = 1 << 14  # tokens that are drawn to count whom a limited gate meets: 4 nodes of 8 to about 0.002


class Answer(Model):
    """One shape on one NIC, sent one way."""

    nic: str
    ranks: int
    tokens: int
    way: str
    kernels: str
    routing: str  #: how experts are drawn
    meets: float  #: experts, ranks or nodes, by `way`, that a token is sent to, its own among them
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


@functools.cache
def _drawn(experts: int, bounds: tuple[int, ...], topk: int, limit: Limit | None) -> float:
    """Distinct owners of a token's experts; owner i holds the experts from bounds[i] up to bounds[i + 1]."""
    if limit is None:
        return targets(experts, np.diff(bounds).tolist(), topk)
    dice = np.random.default_rng(0)
    return met(draw(dice, _DRAWS, experts, topk, limit), np.array(bounds))


def _scatter(nic: str, size: int, peers: int) -> tuple[float, float]:
    """Return seconds from submit to the last arrival, and the worker's time in it that a next scatter waits for."""
    if peers < 1 or size < 1:
        return 0.0, 0.0
    latency = _costs(nic)["latency_ns"] / 1e9
    found = predict(nic, "scatter", size=size, peers=peers)
    return max(0.0, found.seconds - latency), found.posting_s


def simulate(
    nic: str, ranks: int, *, shape: str = "decode", way: Way = "rank", kernels: Kernels | None = None,
    node: int = 8, tokens: int | None = None, nvlink_gb_s: float = 450.0, limit: Limit | None = None,
    hop_us: float = HOP, whole: bool = False,
) -> Answer:  # fmt: skip
    """Predict a step of `ranks` ranks, `node` of them in a node.

    Args:
        nvlink_gb_s: of a GPU, one way, to others of its node.
        limit: of the experts that a token may take; None: all are alike.
        hop_us: a flag's way within a node, when passing on. whole: passing on begins when all has come.

    Raises ConfigError for a NIC or shape that is none, a node that is not full, nodes without experts, and a limit that
    leaves too few experts.
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
    bounds = tuple(config.expert_bounds.tolist())
    if limit is not None:
        limit.check(e, k)
    to_ranks = meets = _drawn(e, bounds, k, limit)
    remote = ranks - min(ranks, node)
    if way == "expert":
        meets = float(k)
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
        meets = _drawn(e, bounds[::node], k, limit) if nodes > 1 else 1.0
        each = t * meets if nodes > 1 else 0
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
        # Of each node, our own too, as much is passed on; of itself a rank is taken to pass on all, which is too much.
        shares = 1 if whole else nodes
        dispatch += local[0] / shares + hop_us / 1e6
        back_s += local[1] / shares + hop_us / 1e6
    rate = _rate(nic)
    published = PUBLISHED.get((shape, nic, ranks)) if tokens is None else None
    return Answer(
        nic=nic, ranks=ranks, tokens=t, way=way, kernels=kernels.name, meets=meets,
        routing="even" if limit is None else f"even, of {limit.groups} groups at most {limit.most}",
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
