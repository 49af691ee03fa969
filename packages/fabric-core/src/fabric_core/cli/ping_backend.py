"""Which backend, provider and NICs `fabric ping` and `fabric bench` use, from their options and from a peer's address.

Backends read settings of their own (FABRIC_EFA_PROVIDER, FABRIC_VERBS_NICS): an option here stands for the variable
that the backend declares, in this process and those it starts.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from fabric_core.cli import ping_meet
from fabric_core.cli.guard import say
from fabric_core.cli.session import parse_address
from fabric_core.config import Settings
from fabric_core.errors import ConfigError
from fabric_core.registry import BACKENDS, discover, get_backend

if TYPE_CHECKING:
    from fabric_core import NetAddr

__all__ = ["On", "Port", "Provider", "choose", "find"]

Provider = Annotated[str, typer.Option("--provider", help="The backend's provider (efa: tcp, shm, efa, ...).")]
On = Annotated[str, typer.Option("--on", metavar="NIC,...", help="Interfaces, addresses or devices of this side.")]
Port = Annotated[
    int, typer.Option("--port", min=1, max=65535, help="Where HOST is asked, or answers, for the engine's address.")
]


def _declared(backend: str) -> dict[str, str]:
    """Return suffix -> variable for what a backend declares: {"PROVIDER": "FABRIC_EFA_PROVIDER", ...}."""
    variables = getattr(get_backend(backend), "variables", None)
    names = variables if isinstance(variables, dict) else {}
    return {str(name).rpartition("_")[2]: str(name) for name in names}


def _with_providers() -> list[str]:
    names = [plugin.name for plugin in discover(BACKENDS) if plugin.status == "ok"]
    return [name for name in names if "PROVIDER" in _declared(name)]


def choose(backend: str, provider: str, on: str) -> str:
    """Apply --provider and --on; return the backend that is meant, "" for the default.

    Raises ConfigError for a backend that has no such setting, or if it is open which one is meant; BackendError for one
    that cannot be loaded.
    """
    if not (provider or on):
        return backend
    wanted = backend or Settings.load().backend
    if wanted == "auto":
        candidates = _with_providers() if provider else []
        if len(candidates) != 1:
            option = f"--provider {provider}" if provider else f"--on {on}"
            raise ConfigError(f"{option}: of which backend? --backend NAME says so; `fabric plugins` lists them")
        wanted = candidates[0]
    declared = _declared(wanted)
    for option, suffix, value in (("--provider", "PROVIDER", provider), ("--on", "NICS", on)):
        if value and suffix not in declared:
            raise ConfigError(f"{option} {value}: backend {wanted} has no such setting; `fabric env` lists them")
        if value:
            os.environ[declared[suffix]] = value
    return wanted


def find(text: str, backend: str, port: int, timeout: float) -> NetAddr:
    """Return the address of the peer that is meant: an address, a name of the local backend, or a HOST to be asked.

    What its backend then needs to get there and has not been told, it is told: the provider that is in the address, and
    our own IP addresses towards it. Raises what `ping_meet.ask` raises, and ProtocolError.
    """
    host = ping_meet.host_of(text, port, plain=backend not in ("", "local"))
    address = ping_meet.ask(*host, timeout) if host else parse_address(text)
    if backend and backend != address.backend:
        raise ConfigError(f"--backend {backend}: the peer has backend {address.backend} ({address})")
    if address.backend == "local":
        return address
    declared = _declared(address.backend)
    there = ping_meet.hosts_of(address)
    told = {}
    if "PROVIDER" in declared and "/" in address.domains[0]:
        told[declared["PROVIDER"]] = address.domains[0].partition("/")[0].replace("+", ";")
    if "PROVIDER" in declared and "NICS" in declared and there:  # others name devices, and find those that are near
        here = dict.fromkeys(ping_meet.local_address(host) for host in there)
        if not all(address.startswith("127.") for address in here):
            told[declared["NICS"]] = ",".join(here)
    told = {name: value for name, value in told.items() if not os.environ.get(name)}
    os.environ.update(told)
    if told:
        say("as the peer's address wants it: " + " ".join(f"{name}={value}" for name, value in told.items()))
    return address
