"""Settings of an engine that lives inside of another program, which may not run for seconds."""

from __future__ import annotations

from fabric_core.config import Settings

__all__ = ["patient"]

# Seconds. A process that serves a model is kept from running now and then: by its own threads, or by its neighbours.
# Who takes it for lost too early loses its requests, and SGLang never asks such a decoder again.
_HEARTBEAT = 5.0
_CONNECT = 10.0  # the same of first contact


def patient(backend: str | None = None) -> Settings:
    """Return settings in which a peer may stand still for ten seconds; what the environment says comes first."""
    found = Settings.load(backend=backend)
    wanted = {"heartbeat": _HEARTBEAT, "connect_timeout": _CONNECT}
    sources = found.sources()
    return found.replace(**{key: value for key, value in wanted.items() if sources[key] == "default"})
