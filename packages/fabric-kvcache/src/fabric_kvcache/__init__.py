"""KV-cache transfer between prefill and decode processes.

`Decoder` asks, `Prefiller` serves; `KvLayout` is what they must agree on. Needs numpy; torch only for the demo.
"""

from __future__ import annotations

from fabric_kvcache.decoder import Decoder
from fabric_kvcache.job import PrefillJob
from fabric_kvcache.layout import KvLayout
from fabric_kvcache.pending import KvDamaged, PendingKv, PrefillRefused
from fabric_kvcache.pool import PageLease, PagePool, PoolExhausted
from fabric_kvcache.prefiller import Prefiller
from fabric_kvcache.received import ReceivedKv

__version__ = "0.1.0"

__all__ = [
    "Decoder",
    "KvDamaged",
    "KvLayout",
    "PageLease",
    "PagePool",
    "PendingKv",
    "PoolExhausted",
    "PrefillJob",
    "PrefillRefused",
    "Prefiller",
    "ReceivedKv",
    "__version__",
]
