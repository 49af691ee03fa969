"""Settings of an engine that lives inside of another program, which may not run for seconds."""

from __future__ import annotations

from typing import Any

from fabric_core.config import Settings

__all__ = ["patient"]

# Seconds. A process that serves a model is kept from running now and then: by its own threads, or by its neighbours.
# Who takes it for lost too early loses its requests, and SGLang never asks such a decoder again. On processors, vLLM's
# may not answer for longer than fabric's heartbeat of one second allows.
_HEARTBEAT = 5.0
_CONNECT = 10.0  # the same of first contact


def patient(**given: Any) -> Settings:
    """Return settings in which a peer may stand still for ten seconds; what is given or in the environment comes first.

    None counts as not given. Raises ConfigError.
    """
    found = Settings.load(**given)
    wanted = {"heartbeat": _HEARTBEAT, "connect_timeout": _CONNECT}
    sources = found.sources()
    return found.replace(**{key: value for key, value in wanted.items() if sources[key] == "default"})
