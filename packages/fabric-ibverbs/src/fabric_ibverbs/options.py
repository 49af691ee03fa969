"""Settings of this backend: environment variables, read when an engine is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fabric_core.errors import ConfigError

__all__ = ["VARIABLES", "Options"]

#: Variable -> help, for `fabric env` and `fabric doctor`.
VARIABLES: dict[str, str] = {
    "FABRIC_VERBS_NICS": "Devices to open, in this order: mlx5_0,mlx5_1:2 (name, and port if not the first active). "
    "Not set: those near the device, that are up",
    "FABRIC_VERBS_GID": "Index in the GID table, 0 to 255. Not set: the first of RoCE v2 with an IPv4 address, else of "
    "RoCE v2; 0 on InfiniBand",
    "FABRIC_VERBS_PKEY": "Partition key, e.g. 0x8001. Not set: the first of the port's table",
    "FABRIC_VERBS_SL": "Service level, 0 to 15 (InfiniBand; RoCE with VLAN priorities). Not set: 0",
    "FABRIC_VERBS_TRAFFIC_CLASS": "Traffic class, 0 to 255: DSCP times 4 on RoCE. Not set: 0",
    "FABRIC_VERBS_GRH": "1: a global route header also inside an InfiniBand subnet. Not set: where it is needed",
    "FABRIC_VERBS_MTU": "Path MTU at most, in bytes: 512, 1024, 2048, 4096. Not set: the smaller of both ports'",
    "FABRIC_VERBS_TIMEOUT": "Exponent of the acknowledgement time-out, 4.096 us * 2^n, 8 to 24. Not set: 16 (0.27 s)",
    "FABRIC_VERBS_RETRY": "How often a packet is sent again, 1 to 6. Not set: 6",
    "FABRIC_VERBS_DEPTH": "Writes in flight per peer and NIC, a power of two from 16 to 4096. Not set: 128",
    "FABRIC_VERBS_CHAIN": "Requests per doorbell, 1 to 64. Not set: 4",
    "FABRIC_VERBS_INLINE": "Bytes of a write that are copied into its request, 0 to 1024. Not set: 220",
    "FABRIC_VERBS_RELAXED": "0: no relaxed ordering. Not set: used where the library and the NIC have it",
    "FABRIC_VERBS_PEERS": "Peers per NIC at most, each way. Not set: what the NIC's queues hold, 1024 at most",
    "FABRIC_VERBS_LIBRARY": "Path of libibverbs.so.1. Not set: as the loader finds it",
}

_MOST_MTU = 4096
_MOST_GID = 255  # verbs has 8 bits for the index in a path


@dataclass(frozen=True)
class Options:
    """The variables, parsed."""

    nics: tuple[str, ...] = ()
    gid: int | None = None
    pkey: int | None = None
    sl: int = 0
    traffic_class: int = 0
    grh: bool = False
    mtu: int = 0
    timeout: int = 16
    retry: int = 6
    depth: int = 128
    chain: int = 4
    inline: int = 220
    relaxed: bool = True
    peers: int = 0
    library: str = ""

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ) -> Options:
        """Read them. Raises ConfigError naming the variable and what it takes."""

        def number(name: str, default: int, low: int, high: int) -> int:
            text = environ.get(f"FABRIC_VERBS_{name}", "").strip()
            if not text:
                return default
            try:
                value = int(text, 0)
            except ValueError:
                value = low - 1
            if not low <= value <= high:
                raise ConfigError(f"FABRIC_VERBS_{name} = {text!r}: must be an integer from {low} to {high}")
            return value

        names = tuple(
            name for name in (part.strip() for part in environ.get("FABRIC_VERBS_NICS", "").split(",")) if name
        )
        depth = number("DEPTH", 128, 16, 4096)
        if depth & (depth - 1):
            raise ConfigError(f"FABRIC_VERBS_DEPTH = {depth}: must be a power of two from 16 to 4096")
        mtu = number("MTU", 0, 512, _MOST_MTU)
        if mtu & (mtu - 1):
            raise ConfigError(f"FABRIC_VERBS_MTU = {mtu}: must be 512, 1024, 2048 or 4096")
        gid, pkey = number("GID", -1, 0, _MOST_GID), number("PKEY", -1, 1, 0xFFFF)
        return cls(
            nics=names,
            gid=None if gid < 0 else gid,
            pkey=None if pkey < 0 else pkey,
            sl=number("SL", 0, 0, 15),
            traffic_class=number("TRAFFIC_CLASS", 0, 0, 255),
            grh=bool(number("GRH", 0, 0, 1)),
            mtu=mtu,
            timeout=number("TIMEOUT", 16, 8, 24),
            retry=number("RETRY", 6, 1, 6),
            depth=depth,
            chain=number("CHAIN", 4, 1, 64),
            inline=number("INLINE", 220, 0, 1024),
            relaxed=bool(number("RELAXED", 1, 0, 1)),
            peers=number("PEERS", 0, 1, 1024),
            library=environ.get("FABRIC_VERBS_LIBRARY", "").strip(),
        )
