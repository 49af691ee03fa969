"""Which ports a group gets: those that were named, or those near its device that are up; and by which GID."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fabric_core.domain import MAX_NICS, GroupConfig
from fabric_core.errors import BackendError, ConfigError
from fabric_core.topology import Nic, Port, RealSystem, Topology, nics_for_cpu, nics_for_gpus, read
from fabric_ibverbs.options import Options

__all__ = ["Choice", "choose", "gid_index", "machine", "pkey_index"]

_NAME = re.compile(r"([A-Za-z0-9_.-]+)(?::(\d+))?")
_IPV4 = re.compile(r"0000:0000:0000:0000:0000:ffff:")


@dataclass(frozen=True)
class Choice:
    """One port to open."""

    nic: Nic
    port: Port
    gid_index: int
    pkey_index: int


def machine() -> Topology:
    """Return this machine's topology."""
    return read(RealSystem())


def choose(options: Options, config: GroupConfig, topology: Topology | None = None) -> list[Choice]:
    """Return what to open for a group, 1 to MAX_NICS ports.

    Raises ConfigError (a name, a count, a GID that is not there) and BackendError (nothing is up).
    """
    topology = machine() if topology is None else topology
    rdma = [nic for nic in topology.nics if nic.rdma]
    pairs = _named(options, rdma) if options.nics else _near(config, topology, rdma)
    if not pairs:
        down = ", ".join(nic.name for nic in rdma)
        raise BackendError(f"no RDMA device that is up{f' (down: {down})' if down else ''}; see `fabric doctor`")
    wanted = min(config.nics or len(pairs), MAX_NICS)
    if wanted > len(pairs):
        names = ", ".join(nic.name for nic, _port in pairs)
        raise ConfigError(f"nics={wanted}: {config.device} has {len(pairs)} RDMA devices that are up: {names}")
    return [
        Choice(nic, port, gid_index(options, nic, port), pkey_index(options, nic, port)) for nic, port in pairs[:wanted]
    ]


def _active(nic: Nic) -> Port | None:
    return next((port for port in nic.ports if port.state == "active"), None)


def _named(options: Options, rdma: list[Nic]) -> list[tuple[Nic, Port]]:
    found: list[tuple[Nic, Port]] = []
    for word in options.nics:
        match = _NAME.fullmatch(word)
        nic = next((nic for nic in rdma if match and nic.name == match[1]), None)
        if match is None or nic is None:
            known = ", ".join(nic.name for nic in rdma) or "none"
            raise ConfigError(f"FABRIC_VERBS_NICS: {word!r} is not here; RDMA devices: {known}")
        number = int(match[2]) if match[2] else None
        port = next((port for port in nic.ports if port.number == number), None) if number else _active(nic)
        if port is None:
            raise ConfigError(f"FABRIC_VERBS_NICS: {word!r} has no {'such' if number else 'active'} port")
        if (nic, port) in found:
            raise ConfigError(f"FABRIC_VERBS_NICS: {word!r} is named twice")
        found.append((nic, port))
    return found


def _near(config: GroupConfig, topology: Topology, rdma: list[Nic]) -> list[tuple[Nic, Port]]:
    up = [nic for nic in rdma if _active(nic)]
    if config.device.startswith("cuda:"):
        near = nics_for_gpus(topology, up).get(f"gpu{config.device.partition(':')[2]}", ())
    else:
        names = {nic.name for nic in up}
        near = tuple(nic for nic in nics_for_cpu(topology, config.numa) if nic.name in names) or tuple(up)
    return [(nic, port) for nic in near if (port := _active(nic))]


def gid_index(options: Options, nic: Nic, port: Port) -> int:
    """Return the index of the GID to use. Raises ConfigError if FABRIC_VERBS_GID is not in the port's table."""
    known = {index: (gid, kind) for index, gid, kind in port.gids}
    if options.gid is not None:
        if port.link_layer == "Ethernet" and options.gid < 16 and options.gid not in known:
            text = ", ".join(f"{index} ({gid}, {kind})" for index, (gid, kind) in known.items()) or "none"
            raise ConfigError(f"FABRIC_VERBS_GID = {options.gid}: {nic.name} has no such GID; it has: {text}")
        return options.gid
    if port.link_layer != "Ethernet":
        return 0

    def rank(index: int) -> tuple[int, int]:
        gid, kind = known[index]
        if kind == "RoCE v2":
            return (0 if _IPV4.match(gid) else 2 if gid.startswith("fe80:") else 1, index)
        return (3, index)

    best = min(known, key=rank, default=None)
    if best is None:
        raise BackendError(f"{nic.name} port {port.number} has no GID: give its interface an IP address")
    return best


def pkey_index(options: Options, nic: Nic, port: Port) -> int:
    """Return where FABRIC_VERBS_PKEY is in the port's table (0 if not set). Raises ConfigError if it is not there."""
    if options.pkey is None:
        return 0
    folder = Path(f"/sys/class/infiniband/{nic.name}/ports/{port.number}/pkeys")
    found: dict[int, int] = {}
    for entry in folder.glob("[0-9]*"):
        try:
            found[int(entry.name)] = int(entry.read_text(), 16)
        except (OSError, ValueError):
            continue
    for index, key in sorted(found.items()):
        if key & 0x7FFF == options.pkey & 0x7FFF and key:
            return index
    have = ", ".join(sorted({f"{key:#06x}" for key in found.values() if key})) or "none"
    raise ConfigError(f"FABRIC_VERBS_PKEY = {options.pkey:#06x}: {nic.name} port {port.number} has {have}")
