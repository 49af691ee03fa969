"""What an error of a request says: how far it got, what is missing, and of whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabric_core import DeadlineExceeded, FabricError, PeerLost
from fabric_core.errors import CODES
from fabric_kvcache.poison import wanted_pages

if TYPE_CHECKING:
    from fabric_kvcache.pending import PendingKv

__all__ = ["explained", "missing_of"]

_NAMED = 3  # missing pages that an error names; it counts the others


def explained(pending: PendingKv, cause: FabricError, phase: str) -> FabricError:
    """Say more about an end: what is missing, and of whom."""
    peer = ", ".join(str(rank.address) for rank in pending._sources) or ", ".join(map(str, pending.prefillers))
    missing = missing_of(pending) if pending._decoder.verify and phase != "greeting" else ""
    if isinstance(cause, DeadlineExceeded):
        if phase == "greeting":
            text = f"it did not answer the handshake within {pending.request.timeout:g} s"
        else:
            text = f"the KV of {pending.request.total} tokens did not arrive within {pending.request.timeout:g} s"
            if pending._decoder.verify:
                text += f"; {missing or 'all pages are there, but not all immediates'}"
        cure = "raise the timeout if the prefiller is only slow; else look into its log"
        return DeadlineExceeded(text, peer=peer, op="prefill", code=cause.code, cure=cure)
    if isinstance(cause, PeerLost):
        known = CODES.get(cause.code or "")
        text = f"{cause.reason or (known.meaning if known else 'it is gone')}, before all KV had arrived"
        text += f"; {missing}" if missing else ""
        return type(cause)(text, peer=cause.peer or peer, nic=cause.nic, op="prefill", code=cause.code)
    return cause


def missing_of(pending: PendingKv) -> str:
    """Name the pages that hold poison; "" if there are none."""
    request = pending.request
    pages = pending._lease.missing(request.start, request.total)
    tail = request.tail and pending._decoder._tail_missing(pending._slot)
    total = wanted_pages(pending._decoder.shard, request.start, request.total)
    if pages and len(pages) == total:
        return f"none of {total} pages has arrived"
    parts = []
    if pages:
        named = ", ".join(str(page) for page in pages[:_NAMED])
        more = f" and {len(pages) - _NAMED} more" if len(pages) > _NAMED else ""
        parts.append(f"{len(pages)} of {total} pages missing: {named}{more}")
    if tail:
        parts.append("the tail is missing")
    return "; ".join(parts)
