"""KV-cache transfer between prefill and decode processes.

`Decoder` asks, `Prefiller` serves; each is one rank, and describes its cache by a `CacheLayout`, or a `KvLayout` where
one rank holds all heads. Needs numpy; torch only for the demo.
"""

from __future__ import annotations

from fabric_kvcache.cache import AttentionGroup, CacheLayout, LatentGroup, StateGroup, StatePart
from fabric_kvcache.decoder import Decoder
from fabric_kvcache.errors import KvDamaged, PrefillRefused
from fabric_kvcache.job import PrefillJob
from fabric_kvcache.layout import KvLayout
from fabric_kvcache.match import LayoutMismatch
from fabric_kvcache.pending import PendingKv
from fabric_kvcache.pool import PageLease, PagePool, PoolExhausted
from fabric_kvcache.prefiller import Prefiller
from fabric_kvcache.received import ReceivedKv
from fabric_kvcache.watcher import LayerWatch

__version__ = "0.1.0"

__all__ = [
    "AttentionGroup",
    "CacheLayout",
    "Decoder",
    "KvDamaged",
    "KvLayout",
    "LatentGroup",
    "LayerWatch",
    "LayoutMismatch",
    "PageLease",
    "PagePool",
    "PendingKv",
    "PoolExhausted",
    "PrefillJob",
    "PrefillRefused",
    "Prefiller",
    "ReceivedKv",
    "StateGroup",
    "StatePart",
    "__version__",
]
