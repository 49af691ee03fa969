"""LMCache's transfer channel `fabric`: caches of peers are read over fabric. See docs/engines.md.

    python -m fabric_kvcache.lmcache server ... --p2p-transfer-engine fabric --p2p-advertise-url HOST:PORT

Importing this package does not import LMCache.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Make the channel known to LMCache's factory, as `fabric`. May be called twice."""
    from lmcache.v1.distributed.transfer_channel.factory import (  # type: ignore[import-not-found]
        register_transfer_channel_factory,
    )

    from fabric_kvcache.lmcache.channel import FabricTransferChannelContext

    try:
        register_transfer_channel_factory("fabric", FabricTransferChannelContext)
    except ValueError:  # a process may run its plug-ins twice
        pass
