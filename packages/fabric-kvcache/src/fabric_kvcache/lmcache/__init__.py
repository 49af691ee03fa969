"""LMCache's transfer channel `fabric`: caches of peers are read over fabric. See docs/engines.md.

    python -m fabric_kvcache.lmcache server ... --p2p-transfer-engine fabric --p2p-advertise-url HOST:PORT

Importing this package does not import LMCache.
"""

from __future__ import annotations

from functools import partial

from fabric_core import Unsupported

__all__ = ["register"]


def register(load_timeout: float = 30.0) -> None:
    """Make the channel known to LMCache's factory, as `fabric`. May be called twice; the first call counts.

    Args:
        load_timeout: LMCache's --p2p-load-timeout, in seconds: after that it uses the memory of a read again without
            a word to the channel, so ours has ended before.

    Raises Unsupported: this LMCache has no such factory.
    """
    try:
        from lmcache.v1.distributed.transfer_channel.factory import (  # type: ignore[import-not-found]
            register_transfer_channel_factory,
        )

        from fabric_kvcache.lmcache.channel import FabricTransferChannelContext
    except ImportError as error:
        raise Unsupported(f"no LMCache with transfer channels is installed: {error}. 0.5.6 was tried") from error

    try:
        register_transfer_channel_factory("fabric", partial(FabricTransferChannelContext, timeout=load_timeout * 5 / 6))
    except ValueError:  # a process may run its plug-ins twice
        pass
