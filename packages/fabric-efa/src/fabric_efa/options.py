"""Settings of this backend: environment variables, read when an engine is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fabric_core.errors import ConfigError

__all__ = ["VARIABLES", "Options"]

#: Variable -> help, for `fabric env` and `fabric doctor`.
VARIABLES: dict[str, str] = {
    "FABRIC_EFA_PROVIDER": "libfabric provider: efa, efa-direct, tcp, shm, verbs, cxi, ... Not set: efa if there is "
    "one, else tcp",
    "FABRIC_EFA_NICS": "Where to open NICs, in this order: source addresses (127.0.0.2,10.0.0.5) or names of "
    "interfaces or provider domains. Not set: EFA devices near the GPU, else 127.0.0.1",
    "FABRIC_EFA_LIBRARY": "Path of libfabric.so.1. Not set: as the loader finds it",
    "FABRIC_EFA_STRICT": "For tests, a seed: demand on any provider what EFA demands, and post in random order",
    "FABRIC_EFA_UNGUARDED": "For tests, 1: let engines of one process talk over shm, which crashes the provider",
}


@dataclass(frozen=True)
class Options:
    """The variables, parsed."""

    provider: str = ""
    nics: tuple[str, ...] = ()
    library: str = ""
    strict: int | None = None
    unguarded: bool = False

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ) -> Options:
        """Read them. Raises ConfigError naming the variable and what it takes."""
        strict = environ.get("FABRIC_EFA_STRICT", "").strip()
        if strict and not strict.isdecimal():
            raise ConfigError(f"FABRIC_EFA_STRICT = {strict!r}: must be a seed, an integer from 0")
        unguarded = environ.get("FABRIC_EFA_UNGUARDED", "").strip()
        if unguarded not in ("", "0", "1"):
            raise ConfigError(f"FABRIC_EFA_UNGUARDED = {unguarded!r}: must be 0 or 1")
        names = tuple(name for name in (part.strip() for part in environ.get("FABRIC_EFA_NICS", "").split(",")) if name)
        if len(names) != len(set(names)):
            raise ConfigError(f"FABRIC_EFA_NICS = {','.join(names)!r}: names a NIC twice")
        return cls(
            provider=environ.get("FABRIC_EFA_PROVIDER", "").strip(),
            nics=names,
            library=environ.get("FABRIC_EFA_LIBRARY", "").strip(),
            strict=int(strict) % (1 << 62) if strict else None,
            unguarded=unguarded == "1",
        )
