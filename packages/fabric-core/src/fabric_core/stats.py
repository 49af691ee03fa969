"""What `engine.stats()` returns: counters of the C engine as plain dicts, and quantiles out of its histograms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fabric_core.native_lib import ffi, lib, text

if TYPE_CHECKING:
    from fabric_core.base import EngineBase

__all__ = ["collect", "quantiles", "refused"]

_COUNTERS = (
    "submitted", "done", "failed", "cancelled", "bytes", "wrs", "imms", "imm_stray", "recvs",
    "steps", "helps", "sleeps", "kicks", "faults", "inflight",
)  # fmt: skip
_PEER_STATES = ("new", "connecting", "ready", "lost")


def quantiles(buckets: Sequence[int]) -> dict[str, float]:
    """Return p50/p99/p999 in microseconds out of power-of-two buckets of nanoseconds (upper edge of the bucket)."""
    total = sum(buckets)
    found: dict[str, float] = {"count": total}
    for name, share in (("p50_us", 0.5), ("p99_us", 0.99), ("p999_us", 0.999)):
        seen = 0
        found[name] = 0.0
        for i, n in enumerate(buckets):
            seen += n
            if total and seen >= share * total:
                found[name] = (2 << i) / 1000
                break
    return found


_MOST_COUNTERS = 64


def refused(engine: EngineBase) -> dict[str, int]:
    """Return what the NICs of an engine have refused, by kind, summed over all of them (S9). See docs/backend.md."""
    out = ffi.new("fab_counter[]", _MOST_COUNTERS)
    found: dict[str, int] = {}
    for group, addr in enumerate(engine._addrs):
        for nic in range(len(addr.domains)):
            n = lib.fab_nic_counters(engine._core.pointer, group, nic, out, _MOST_COUNTERS)
            for i in range(max(0, min(n, _MOST_COUNTERS))):
                name = text(out[i].name)
                found[name] = found.get(name, 0) + int(out[i].value)
    return found


def collect(engine: EngineBase) -> dict[str, Any]:
    """Return the counters of an engine: {"groups": [...], "peers": {address: ...}, "refused": {kind: n}} and sums."""
    out = ffi.new("fab_stats *")
    groups = []
    for group, device in enumerate(engine.devices):
        lib.fab_engine_stats(engine._core.pointer, group, out)
        row: dict[str, Any] = {"device": device, **{name: int(getattr(out, name)) for name in _COUNTERS}}
        row["submit_to_post"] = quantiles(list(out.submit_to_post))
        row["post_to_done"] = quantiles(list(out.post_to_done))
        groups.append(row)
    peers: dict[str, Any] = {}
    peer = ffi.new("fab_peer_stats *")
    for (group, number), addr in list(engine._names.items()):
        lib.fab_engine_peer_stats(engine._core.pointer, group, number, peer)
        nics = [
            {"nic": i, "bytes": int(peer.bytes[i]), "ops": int(peer.ops[i]), "errors": int(peer.errors[i])}
            for i in range(peer.nnics)
        ]
        peers[f"{addr}" if group == 0 else f"{addr}@{engine.devices[group]}"] = {
            "state": _PEER_STATES[peer.state],
            "nics": nics,
        }
    shared = ("imm_stray", "inflight")  # counted once per engine, not per group
    sums = {name: groups[0][name] if name in shared else sum(g[name] for g in groups) for name in _COUNTERS}
    return {**sums, "groups": groups, "peers": peers, "refused": refused(engine)}
